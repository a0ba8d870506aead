"""A run's records with the model opened: what building a cache and training need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lookonce.cache.build.estimate import Estimate, estimate
from lookonce.cache.build.planner import ensure_plan, planned_images
from lookonce.cache.build.report import BuildReport
from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.constants import BUILD_COMMAND
from lookonce.cache.maintenance.staging import find_staged
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint_notes import Source
from lookonce.cache.store.manifest import ensure_manifest
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.environment import best_device, device_name
from lookonce.errors import FeaturesMissing, ImageError
from lookonce.run.config import RunFile
from lookonce.run.model_ref import open_model, source_of
from lookonce.run.records import RunRecords, find_images, read_splits


@dataclass(frozen=True)
class RunInputs(RunRecords):
    """A run's records, images and model, opened and checked."""

    source: Source
    """The files and settings that the fingerprint was computed from."""
    model_folder: ModelFolder
    processor: ImageProcessor

    @classmethod
    def open(cls, run: RunFile, *, trust_plan: bool = False) -> RunInputs:
        """Read the records, open the model, hash the images and the tower.

        `trust_plan`: images that the cache's plan names are not read; their keys are taken from the plan.

        Raises:
            LookonceError: records, images or model are missing or broken.
        """
        records = read_splits(run)
        source = source_of(run)  # before reading, so that a change meanwhile is noticed later
        model_folder, processor, fingerprint = open_model(source)
        source.write_note(run.cache.dir, fingerprint)
        images = find_images(run, fingerprint, records, trust_plan=trust_plan)
        return cls(run, fingerprint, records, images, source, model_folder, processor)

    def estimate(self, num_pilot: int) -> Estimate:
        """What `build` would do; after encoding `num_pilot` images, also how long it would take."""
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
        """Write the plan, so that workers need not hash the images."""
        ensure_manifest(self.cache_folder, self.fingerprint, self._provenance())
        wanted = planned_images(self.images, self.processor)
        ensure_plan(self.cache_folder, wanted, self.fingerprint, self.shard_bytes)
        self._note_fingerprint()

    def load_tower(self, *, fast: bool | None = None) -> Tower:
        """The tower, on the best device."""
        return Tower(self.model_folder, self.fingerprint.storage.compute, best_device(), fast=fast)

    def build(
        self, worker: tuple[int, int] | None = None, *, wait: bool = True, retry_quarantined: bool = False
    ) -> BuildReport:
        """Encode the images that the cache lacks, together with any number of other workers."""
        options = BuildOptions(
            self.shard_bytes,
            self._provenance(),
            worker,
            wait,
            retry_quarantined,
            self.run.cache.claim_s,
        )
        root = self.run.cache.dir
        report = build_cache(root, self.fingerprint, self.processor, self.images, self.load_tower, options)
        self._note_fingerprint()
        return report

    def _note_fingerprint(self) -> None:
        """Record the fingerprint again: its folder may not have existed before."""
        self.source.write_note(self.run.cache.dir, self.fingerprint)

    def _provenance(self) -> dict[str, Any]:
        return {"model": self.run.model.path, "revision": self.run.model.revision, "device": device_name()}

    def open_cache(self) -> VisionCache:
        """Open this run's cache, which must have the features of all its images.

        Raises:
            CacheError: the cache does not exist, or it lacks images; names the first one and a record with it.
        """
        options, keys = self.run.cache, self.images.path_of
        staged = find_staged(options.stage, self.fingerprint, keys, check=options.check) if options.stage else None
        cache = staged or find_cache(options.dir, self.fingerprint, check=options.check)
        missing = [
            (path, record.origin)
            for record in self.all_records()
            for path in record.images
            if self.images.key_of.get(path, "") not in cache
        ]
        if missing:
            path, origin = missing[0]
            reason = self.images.unusable.get(path)
            if reason is None and (failure := cache.failed.get(self.key_of(path))):
                reason = failure.reason
            advice = (
                f"it is quarantined ({reason}); repair the file or remove its records"
                if reason
                else f"run: {BUILD_COMMAND}"
            )
            num_images = len({path for path, _ in missing})
            raise FeaturesMissing(
                f"{cache.folder} lacks the features of {num_images} of {self.images.num_files} images, "
                f"the first being {path} ({origin}): {advice}"
            )
        return cache

    def identity(self) -> dict[str, Any]:
        """Hashes of what a training depends on: the whole model, the cache's fingerprint, training and validation
        records. The test split is not among them.

        Raises:
            ImageError: an image cannot be read.
        """
        self._refuse_unusable()
        return {"model": self.model_folder.content_hash(), **self.cheap_identity()}

    def _refuse_unusable(self) -> None:
        for record in self.all_records():
            for path in record.images:
                if path in self.images.unusable:
                    raise ImageError(
                        f"{len(self.images.unusable)} of {self.images.num_files} images cannot be read; the first is "
                        f"used by {record.origin}: {self.images.unusable[path]}; repair it or remove its records"
                    )
