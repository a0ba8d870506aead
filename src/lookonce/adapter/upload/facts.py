"""What a model card says of a run, read from the run folder and from what is beside the records.

Design: nothing is estimated, and what is not recorded is left out or called unknown. The dataset and its licence are in
the report of `lookonce data prepare` beside the training records; for other records the user may name a known dataset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lookonce.adapter.upload.base_model import BaseModel
from lookonce.datasets.prepare.definition import find_definition
from lookonce.errors import LookonceError
from lookonce.eval.scores.metrics import read_metrics
from lookonce.report.runs import ReportedRun, SplitFacts
from lookonce.report.training import Cost
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.records import HELD_OUT, read_split
from lookonce.version import DIRTY

UNKNOWN = "unknown"
SCORED = ("test", "val", HELD_OUT, "train")
"""The splits whose scores are on the card, in this order."""
COMMIT = re.compile(rf"[0-9a-f]{{40,64}}({DIRTY})?")
SHARED = {
    *("overall", "exact_match_interval", "baselines", "by_category", "by_stage", "metrics", "counts", "text_metrics"),
}
"""Keys of an evaluation that are uploaded; names in other groups may be texts of records, or names of places."""


@dataclass(frozen=True)
class Dataset:
    """What a run was trained on."""

    title: str
    hub_id: str | None
    """Owner and name on the Hub; None if it is not there."""
    revision: str | None
    """The commit that was prepared; None if it is not recorded."""
    licence: str
    homepage: str

    @property
    def forbids_commercial_use(self) -> bool:
        return "NC" in self.licence.upper().replace("-", " ").split()


@dataclass(frozen=True)
class CardFacts:
    """A run, in what other people should know of it."""

    run: RunFile
    base: BaseModel
    dataset: Dataset
    scores: Mapping[str, Mapping[str, Any]]
    """The evaluation of each split as JSON, without groups whose names are texts of records."""
    splits: Mapping[str, SplitFacts]
    """Empty if the records cannot be read any more."""
    systems: list[str] | None
    """The system texts of the training records; None if they cannot be read any more."""
    trained: Mapping[str, Any]
    """The figures of the training."""
    libraries: Mapping[str, str]
    """Versions by name."""
    commit: str | None
    """The git commit of lookonce that trained the run, with `-dirty` if there were changes; None if it is unknown."""
    gpus: list[str]
    gpu_hours: float | None
    """Training and answering; None on a CPU, or if it is not recorded."""


def facts_of(folder: RunFolder, base: BaseModel, dataset: str | None = None) -> CardFacts:
    """The facts of a run; `dataset` is a known dataset, or a YAML file that defines one.

    Raises:
        UsageError: there is no such dataset.
        RunFolderError: the folder holds no run.
    """
    run = folder.read_run()
    reported = ReportedRun(folder.folder.name, run.eval.split, None, folder, run)
    libraries = reported.environment.get("libraries") or {}
    return CardFacts(
        run=run,
        base=base,
        dataset=find_dataset(dataset, reported.data.prepared),
        scores={split: scores for split in SCORED if (scores := _scores(folder, split))},
        splits=reported.data.splits,
        systems=_systems(run),
        trained=reported.trained,
        libraries={name: version for name, version in libraries.items() if version},
        commit=_commit(reported.environment.get("commit")),
        gpus=reported.environment.get("gpus") or [],
        gpu_hours=Cost.of(reported).gpu_hours,
    )


def find_dataset(name: str | None, prepared: Mapping[str, Any]) -> Dataset:
    """The dataset of that name; without a name, the one in the report of `lookonce data prepare`."""
    if name is None:
        definition = prepared.get("settings", {}).get("definition", {})
        hub = definition.get("hub") or {}
        return Dataset(
            title=prepared.get("title") or prepared.get("name") or UNKNOWN,
            hub_id=hub.get("id"),
            revision=prepared.get("source", {}).get("revision") if hub else None,
            licence=prepared.get("licence") or UNKNOWN,
            homepage=prepared.get("homepage") or "",
        )
    known = find_definition(name)
    hub_id = known.hub.id if known.hub else None
    return Dataset(known.title or known.name, hub_id, None, known.licence, known.homepage)


def _commit(recorded: object) -> str | None:
    """A recorded commit, unless the record has something else in its place."""
    return recorded if isinstance(recorded, str) and COMMIT.fullmatch(recorded) else None


def _scores(folder: RunFolder, split: str) -> dict[str, Any]:
    return {key: value for key, value in read_metrics(folder, split).items() if key in SHARED}


def _systems(run: RunFile) -> list[str] | None:
    try:
        return list(dict.fromkeys(record.system for record in read_split(run, "train") if record.system))
    except (LookonceError, OSError):
        return None
