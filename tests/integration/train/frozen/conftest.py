"""A training on quantised weights, for the tests of what becomes of its adapter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lookonce.cache.store.reader import VisionCache
from lookonce.run.config import RunFile
from lookonce.workflow import train


@pytest.fixture(scope="module", params=["nf4", "int8"])
def trained(
    request: pytest.FixtureRequest,
    make_run_in: Callable[..., RunFile],
    built: VisionCache,
    tmp_path_factory: pytest.TempPathFactory,
) -> RunFile:
    run = make_run_in(
        tmp_path_factory.mktemp("quantised"),
        cache={"dir": str(built.folder.parent)},
        lora={"rank": 16, "alpha": 32},
        train={"steps": 80, "frozen": request.param, "learning_rate": 5e-3, "logging_steps": 50},
    )
    train(run, notify=lambda note: None)
    return run
