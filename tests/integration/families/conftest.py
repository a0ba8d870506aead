"""A tiny random model of each family, with the sample's images and questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.sample.model import write_model
from lookonce.families.family import Family
from lookonce.families.lookup import FAMILIES
from lookonce.run.config import RunFile


@dataclass(frozen=True)
class FamilySite:
    """A model of a family, and run files on it."""

    family: Family
    model: Path
    folder: Path
    """For caches and run folders, shared by the tests of a file."""
    make_run_in: Callable[..., RunFile]

    def make_run(self, **changes: Any) -> RunFile:
        return self.make_run_in(self.folder, **({"model": {"path": str(self.model)}} | changes))


@pytest.fixture(scope="module", params=[*FAMILIES.values()], ids=lambda family: family.model_type)
def site(
    request: pytest.FixtureRequest, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory
) -> FamilySite:
    folder = tmp_path_factory.mktemp(request.param.model_type)
    write_model(folder / "model", family=request.param)
    return FamilySite(request.param, folder / "model", folder, make_run_in)
