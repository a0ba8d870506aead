"""A run whose frozen weights are fp8: it trains with them, and answers with unrounded ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lookonce.cache.store.reader import VisionCache
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, open_run
from lookonce.train.model.frozen import Fp8Linear
from lookonce.train.model.load import load_trained, load_without_tower
from lookonce.workflow import train


@pytest.fixture(scope="module")
def run(make_run_in: Callable[..., RunFile], built: VisionCache, tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    options = {"steps": 3, "frozen": "fp8", "logging_steps": 1}
    made = make_run_in(tmp_path_factory.mktemp("fp8"), cache={"dir": str(built.folder.parent)}, train=options)
    train(made, notify=lambda note: None)
    return made


def num_fp8(model: Any) -> int:
    return sum(isinstance(module, Fp8Linear) for module in model.modules())


@pytest.mark.guarantee("After training in fp8, answers are computed with unrounded weights.")
def test_it_is_answered_with_unrounded_weights(run):
    assert (run.output / "predictions" / "val.jsonl").exists()
    inputs, adapter = open_run(run, TO_BUILD), run.output / "adapter"
    assert num_fp8(load_trained(inputs.model_folder, run, adapter)) == 0
    assert num_fp8(load_without_tower(inputs.model_folder, torch.float32, frozen="fp8")) > 0
