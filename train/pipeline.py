"""What of a run is done and what is missing: plan, cache, training, evaluation.

Design: everything is read from what the stages leave behind, so nobody keeps a list of what was submitted, and after a
crash of anything the answer is right. Images are known by the plan and its stamps; none is read but those that the plan
does not know, and of these only as many as show that it must grow. A finished run lacks nothing, whatever has become of
its cache since.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lookonce.cache.make.planner import Settled, index_of_plan, missing_shards, pending_shards
from lookonce.cache.store.folder import read_plan
from lookonce.cache.store.plan import Plan, PlannedImage
from lookonce.datasets.images import ImageIndex, bytes_key, index_images, read_many
from lookonce.datasets.records import Record
from lookonce.errors import ImageError, RunFolderError
from lookonce.text import count
from lookonce.train.inputs import Inputs, open_model, read_splits
from lookonce.train.run_file import RunFile
from lookonce.train.run_folder import RunFolder

NUM_PROBED = 64
"""How many images that a plan does not know are read, to see whether it must grow, before all of them are."""


@dataclass(frozen=True)
class State:
    """How far each stage of a run is."""

    is_planned: bool
    """The plan covers all images that can be had."""
    num_pending: int
    """Planned shards that are to be made."""
    is_trained: bool
    is_evaluated: bool
    """On the run file's `eval.split`, if that has records."""
    notes: list[str]
    """What a person has to see to: nothing here is mended by running a stage again."""

    def missing(self) -> list[str]:
        """The stages that still have work, in their order: plan, cache (with the number of shards), train, eval."""
        if self.is_trained and self.is_evaluated:
            return []
        stages = {
            "plan": not self.is_planned,
            "cache": not self.is_planned,
            f"cache {self.num_pending}": self.is_planned and self.num_pending > 0,
            "train": not self.is_trained,
            "eval": not self.is_evaluated,
        }
        return [stage for stage, is_missing in stages.items() if is_missing]


@dataclass(frozen=True)
class Pipeline:
    """A run whose stages may be looked at again and again; its records and its model stay as they were."""

    run: RunFile
    inputs: Inputs
    """With no image yet."""

    @classmethod
    def open(cls, run: RunFile) -> Pipeline:
        """Read the records and hash the tower; reads no image and downloads nothing.

        Raises:
            LookonceError: whatever of it is missing or broken.
        """
        records, model = read_splits(run), open_model(run, is_local=True)
        return cls(run, Inputs(run, *model, records, ImageIndex({}, {})))

    def look(self) -> State:
        """How far it is now.

        Raises:
            CacheCorrupt: a receipt or the plan is not what was written.
        """
        folder = self.inputs.cache_folder
        plan = read_plan(folder)
        images, covers = known_images(plan, self._records())
        settled = Settled.of(folder)
        wanted = [PlannedImage(key, 0, ()) for key in images.path_of]
        fingerprint, shard_bytes = self.inputs.fingerprint, self.inputs.shard_bytes
        covers = covers and not missing_shards(plan, settled, wanted, fingerprint, shard_bytes, images.former)
        pending = pending_shards(plan, settled, images.path_of, images.former)
        return self._state(images, covers, len(pending))

    def _records(self) -> list[Record]:
        return [record for part in self.inputs.records.values() for record in part]

    def _state(self, images: ImageIndex, is_planned: bool, num_pending: int) -> State:
        folder, split = RunFolder(self.run.output), self.run.eval.split
        conflict = self._conflict(folder, images if is_planned else None)
        return State(
            is_planned,
            num_pending,
            folder.trained.exists() and not conflict,
            not conflict and (folder.metrics(split).exists() or not self.inputs.records[split]),
            [*conflict, *_unusable(images)],
        )

    def _conflict(self, folder: RunFolder, images: ImageIndex | None) -> list[str]:
        """Why the output folder is not this run's; of what was read, as far as that is known without the model."""
        identity = {"cache": self.inputs.fingerprint.sha256}
        if images and not images.unusable:
            identity = replace(self.inputs, images=images).cheap_identity()
        try:
            folder.check(self.run, identity)
        except RunFolderError as error:
            return [str(error)]
        return []


def _unusable(images: ImageIndex) -> list[str]:
    if not images.unusable:
        return []
    number, reason = count(len(images.unusable), "image"), next(iter(images.unusable.values()))
    return [f"{number} can not be read, and training refuses that: {reason}; mend it or remove its records"]


def known_images(plan: Plan, records: Iterable[Record]) -> tuple[ImageIndex, bool]:
    """The images of some records as far as a plan knows them, and whether it knows all that can be read."""
    records = list(records)
    paths = dict.fromkeys(path for record in records for path in record.images)
    known = index_of_plan(plan, paths)
    unknown = [path for path in paths if path not in known.key_of]
    if unknown and (not plan.shards or _is_new(plan, unknown)):
        return known, False
    return index_images(records, known), True


def _is_new(plan: Plan, paths: Iterable[Path]) -> bool:
    """Whether the first few of these images hold one that is not planned under any name."""
    planned = {image.key for image in plan.images()}
    looked = itertools.islice(read_many(paths), NUM_PROBED)
    return any(not isinstance(data, ImageError) and bytes_key(data) not in planned for _, data in looked)
