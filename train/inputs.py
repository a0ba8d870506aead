"""What a run reads: its checkpoint, its records, their distinct images, and the cache that fits them all.

Both phases start here, so that they can not disagree on which cache a run file means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lookonce.cache.care.stage import find_staged
from lookonce.cache.make.build import BuildOptions, build_cache
from lookonce.cache.make.estimate import PlanReport, estimate
from lookonce.cache.make.planner import agree_on_plan, index_of_plan, planned_images
from lookonce.cache.make.report import BuildReport
from lookonce.cache.make.status import StatusReport, status
from lookonce.cache.model.checkpoint import Checkpoint
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.names import BUILD_COMMAND
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.folder import read_plan, settle
from lookonce.cache.store.read import VisionCache, find_cache
from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.records import Record, read_records
from lookonce.errors import FeaturesMissing, ImageError
from lookonce.train.model import best_device
from lookonce.train.run_file import RunFile

MEGABYTE = 1_000_000
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Inputs:
    """A run's inputs, opened and checked."""

    run: RunFile
    checkpoint: Checkpoint
    processor: ImageProcessor
    fingerprint: Fingerprint
    records: dict[str, list[Record]]
    """By split: train, val, test; empty where the run file names none."""
    images: ImageIndex

    @classmethod
    def open(cls, run: RunFile, *, trust_plan: bool = False) -> Inputs:
        """Read records and checkpoint, hash the images and the tower.

        `trust_plan` takes the keys of the images that the cache's plan names from there, without reading them.

        Raises:
            LookonceError: whatever of it is missing or broken.
        """
        records = read_splits(run)
        checkpoint, processor, fingerprint = open_model(run)
        everything = [record for part in records.values() for record in part]
        known = None
        if trust_plan:
            plan = read_plan(run.cache.dir / fingerprint.folder_name)
            known = index_of_plan(plan, (path for record in everything for path in record.images))
        return cls(run, checkpoint, processor, fingerprint, records, index_images(everything, known))

    @property
    def cache_folder(self) -> Path:
        return self.run.cache.dir / self.fingerprint.folder_name

    def estimate(self, num_pilot: int) -> PlanReport:
        """What `build` would do; with a pilot of so many images, also how long it would take."""
        epoch = [self.images.key_of.get(path) for record in self.records["train"] for path in record.images]
        return estimate(
            self.cache_folder,
            self.fingerprint,
            self.processor,
            self.images,
            self.shard_bytes,
            [key for key in epoch if key],
            self.load_tower if num_pilot else None,
            num_pilot,
        )

    def write_plan(self) -> None:
        """Fix what is to be made, so that workers need not hash the images."""
        settle(self.cache_folder, self.fingerprint, self._provenance())
        wanted = planned_images(self.images, self.processor)
        agree_on_plan(self.cache_folder, wanted, self.fingerprint, self.shard_bytes)

    def status(self) -> StatusReport:
        """How much of this run's cache is there."""
        return status(self.cache_folder, self.images.path_of, self.run.cache.claim_s)

    @property
    def shard_bytes(self) -> int:
        return self.run.cache.shard_mb * MEGABYTE

    def load_tower(self, *, fast: bool | None = None) -> Tower:
        """The tower, on the best device."""
        return Tower(self.checkpoint, self.fingerprint.storage.compute, best_device(), fast=fast)

    def build(
        self, worker: tuple[int, int] | None = None, *, wait: bool = True, retry_quarantined: bool = False
    ) -> BuildReport:
        """Encode what the cache lacks, beside any number of other workers."""
        options = BuildOptions(
            self.shard_bytes,
            self._provenance(),
            worker,
            wait,
            retry_quarantined,
            self.run.cache.claim_s,
        )
        return build_cache(self.run.cache.dir, self.fingerprint, self.processor, self.images, self.load_tower, options)

    def _provenance(self) -> dict[str, Any]:
        return {"model": self.run.model.path, "revision": self.run.model.revision, "device": device_name()}

    def open_cache(self) -> VisionCache:
        """The cache of this run, with the features of all its images.

        Raises:
            CacheError: there is none, or it lacks images; names the first of them and the record that asks for it.
        """
        options, keys = self.run.cache, self.images.path_of
        staged = find_staged(options.stage, self.fingerprint, keys, check=options.check) if options.stage else None
        cache = staged or find_cache(options.dir, self.fingerprint, check=options.check)
        missing = [
            (path, record.origin)
            for part in self.records.values()
            for record in part
            for path in record.images
            if self.images.key_of.get(path, "") not in cache
        ]
        if missing:
            path, origin = missing[0]
            reason = self.images.unusable.get(path)
            if reason is None and (failure := cache.failed.get(self.key_of(path))):
                reason = failure.reason
            advice = (
                f"it is quarantined ({reason}); mend the file or remove its records"
                if reason
                else f"run: {BUILD_COMMAND}"
            )
            num_images = len({path for path, _ in missing})
            raise FeaturesMissing(
                f"{cache.folder} lacks the features of {num_images} of {self.images.num_files} images, "
                f"the first being {path} ({origin}): {advice}"
            )
        return cache

    def key_of(self, path: Path) -> str:
        return self.images.key_of[path]

    def identity(self) -> dict[str, Any]:
        """What a training depends on, by content: the whole model, the cache's fingerprint, the records it learns from
        and those it validates with; not the test split's.

        Raises:
            ImageError: an image has no content, because it can not be read.
        """
        self._refuse_unusable()
        return {"model": self.checkpoint.content_hash(), **self.cheap_identity()}

    def cheap_identity(self) -> dict[str, Any]:
        """That part of it for which the model need not be read; every image must have a key."""
        return {
            "cache": self.fingerprint.sha256,
            "records": {split: self._hash(part) for split, part in self.records.items() if split != "test"},
        }

    def _refuse_unusable(self) -> None:
        for record in (record for part in self.records.values() for record in part):
            for path in record.images:
                if path in self.images.unusable:
                    raise ImageError(
                        f"{len(self.images.unusable)} of {self.images.num_files} images can not be read, the first is "
                        f"asked for by {record.origin}: {self.images.unusable[path]}; mend it or remove its records"
                    )

    def _hash(self, records: list[Record]) -> str:
        digest = hashlib.sha256()
        for record in records:
            keys = [self.key_of(path) for path in record.images]
            digest.update(repr((keys, record.turns, record.system)).encode())
        return digest.hexdigest()


def read_splits(run: RunFile) -> dict[str, list[Record]]:
    """The records of a run, by split: train, val, test."""
    return {split: list(read_split(run, split)) for split in SPLITS}


def open_model(run: RunFile, *, is_local: bool = False) -> tuple[Checkpoint, ImageProcessor, Fingerprint]:
    """A run's checkpoint, how it takes images, and the fingerprint of its cache.

    `is_local` downloads nothing: a model of the Hub must be here already.
    """
    checkpoint = Checkpoint.open(run.model.path, run.model.revision, is_local=is_local)
    processor = ImageProcessor(checkpoint.folder, run.cache.backend, run.cache.min_pixels, run.cache.max_pixels)
    return checkpoint, processor, Fingerprint.of(checkpoint, processor, run.cache.dtype)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def read_split(run: RunFile, split: str) -> Iterator[Record]:
    """The records of one of them."""
    for path in getattr(run.data, split):
        yield from read_records(path, run.data.image_root, form=run.data.format)
