"""The records of a study's runs, and which runs a build of the cache serves.

Design: a build encodes the images of its run file, those of the selected training records (`data.where`, `data.replay`)
and of all others. So a run needs no build of its own if its images are among those of another one with the same
features: an arm with all records serves the arms with some of them. A share is drawn by the seed, so the seeds of an
arm may differ in their images. They are compared by path, and nothing is hashed. Files are read once for all runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.datasets.records import Record
from lookonce.environment import without_garbage_collection
from lookonce.run.config import RunFile
from lookonce.run.open import FEATURE_SETTINGS
from lookonce.run.records import SPLITS, for_training, read_split
from lookonce.study.expand import StudyRun

FILES = {*SPLITS, "image_root", "format", "coerce_answers"}
SELECTION = {"stage_map", "where", "replay"}
"""Keys of `data` that say which files are read, and which of their training records are used."""


@dataclass(frozen=True)
class Content:
    """What a run trains on, and the images of all its splits."""

    num_train: int
    images: frozenset[Path]


def read_contents(runs: Iterable[StudyRun]) -> dict[str, Content]:
    """The content of each run, by name.

    Raises:
        LookonceError: records are missing or broken, or none is selected.
    """
    files: dict[str, dict[str, list[Record]]] = {}
    contents: dict[str, Content] = {}
    found = {}
    with without_garbage_collection():
        for one in runs:
            data = one.run.data
            if (named := data.model_dump_json(include=FILES)) not in files:
                files[named] = {split: list(read_split(one.run, split)) for split in SPLITS}
            selected = named + data.model_dump_json(include=SELECTION) + (str(one.seed) if data.where else "")
            if selected not in contents:
                contents[selected] = _content(for_training(one.run, files[named]))
            found[one.name] = contents[selected]
    return found


def _content(records: Mapping[str, list[Record]]) -> Content:
    images = frozenset(path for some in records.values() for record in some for path in record.images)
    return Content(len(records["train"]), images)


def find_builders(runs: Iterable[StudyRun], contents: Mapping[str, Content]) -> dict[str, StudyRun]:
    """For each run, by name, the run whose build has its images: of those that could, the one with the most."""
    builders: list[StudyRun] = []
    found = {}
    for one in sorted(runs, key=lambda one: -len(contents[one.name].images)):
        images, features = contents[one.name].images, _features(one.run)
        serving = (other for other in builders if _features(other.run) == features)
        builder = next((other for other in serving if images <= contents[other.name].images), one)
        if builder is one:
            builders.append(one)
        found[one.name] = builder
    return found


def _features(run: RunFile) -> dict[str, Any]:
    """What the features of an image depend on, and the folder that they are in."""
    return run.cache.model_dump(include={"dir"} | FEATURE_SETTINGS) | run.model.model_dump(include={"path", "revision"})
