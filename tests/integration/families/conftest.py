"""A tiny random model of each family, with the sample's images and questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.records import write_records
from lookonce.datasets.sample.model import write_model
from lookonce.families.family import Family
from lookonce.families.lookup import FAMILIES
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, OpenRun, open_run


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


@pytest.fixture(scope="module")
def session(site: FamilySite, sample: Path) -> OpenRun:
    """The records of test_modes.py, with LoRA on all linear layers."""
    from support.trainings import SIZES, records  # pytest rewrites what no conftest has imported

    write_records(site.folder / "records.jsonl", records(sample), image_root=sample)
    data = {"train": str(site.folder / "records.jsonl"), "val": [], "test": [], "image_root": str(sample)}
    inputs = open_run(site.make_run(data=data, cache=SIZES, lora={"targets": "all-linear"}), TO_BUILD)
    inputs.build()
    return inputs
