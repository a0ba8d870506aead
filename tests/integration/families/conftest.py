"""A tiny random model of each family, with the sample's images and questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.records import Record, write_records
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

    def few(self, sample: Path, num_rows: int) -> dict[str, Any]:
        """The section `data` with some records of the sample."""
        path = self.folder / "few.jsonl"
        path.write_text("".join((sample / "test.jsonl").read_text().splitlines(keepends=True)[:num_rows]))
        return {"train": str(path), "val": str(path), "test": [], "image_root": str(sample)}

    def session(self, records: list[Record], image_root: Path, **lora: Any) -> OpenRun:
        """Records whose features are in a cache."""
        from support.trainings import SIZES  # pytest rewrites what no conftest has imported

        write_records(path := self.folder / f"{image_root.name}.jsonl", records, image_root=image_root)
        data = {"train": str(path), "val": [], "test": [], "image_root": str(image_root)}
        caches = SIZES | {"dir": str(self.folder / f"caches of {image_root.name}")}
        inputs = open_run(self.make_run(data=data, cache=caches, lora=lora), TO_BUILD)
        inputs.build()
        return inputs


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
    from support.trainings import records

    return site.session(records(sample), sample, targets="all-linear")
