"""A run's records with the model opened: what building a cache and training need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lookonce.cache.build.estimate import Estimate, estimate
from lookonce.cache.build.planner import ensure_plan, planned_images
from lookonce.cache.build.report import BuildReport
from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.constants import BUILD_COMMAND
from lookonce.cache.maintenance.staging import find_staged
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.claims import using
from lookonce.cache.store.fingerprint_notes import Source
from lookonce.cache.store.manifest import ensure_manifest
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Record
from lookonce.environment import best_device, device_name
from lookonce.errors import FeaturesMissing, ImageError
from lookonce.run.config import RunFile
from lookonce.run.contexts.training import in_context
from lookonce.run.model_ref import fingerprint_of, open_model, source_of
from lookonce.run.records import (
    SPLITS,
    UNUSABLE_ADVICE,
    RunRecords,
    cached_images,
    find_images,
    find_unusable,
    leave_out_unusable,
    read_splits,
)
from lookonce.text import Notify, quiet

Found = TypeVar("Found")
Once = Callable[[Callable[[], Any]], Any]
"""Calls a function in one of several processes and returns its result in all of them."""
Timed = Callable[[str], AbstractContextManager[Any]]


Use = Callable[[Path], object]
"""Claims a cache, before anything in it is read, so that nothing is removed from it meanwhile."""


def at_once(function: Callable[[], Found]) -> Found:
    """`Once` for a single process."""
    return function()


def unclaimed(folder: Path) -> None:
    """`Use` of a command that reads a cache at one moment, or claims it by itself."""


def untimed(name: str) -> AbstractContextManager[Any]:
    """`Timed` without a clock."""
    return nullcontext()


@dataclass(frozen=True)
class RunInputs(RunRecords):
    """A run's records, images and model, opened and checked."""

    source: Source
    """The files and settings that the fingerprint was computed from."""
    model_folder: ModelFolder
    processor: ImageProcessor
    use: Use = field(default=unclaimed, compare=False)

    @classmethod
    def open(
        cls, run: RunFile, *, trust_plan: bool = False, skip_unusable: bool = False, use: Use = unclaimed
    ) -> RunInputs:
        """Read the records, open the model, hash the images and the tower.

        `trust_plan`: images that the cache's plan names are not read; their keys are taken from the plan.
        `skip_unusable`: give records contexts and leave some out as training does, if the run file asks for it; a build
        tries all images. `use` claims the cache.

        Raises:
            LookonceError: records, images or model are missing or broken.
        """
        notes: list[str] = []
        records = read_splits(run, notes.append)
        source = source_of(run)  # before reading, so that a change meanwhile is noticed later
        model_folder, processor, fingerprint = open_model(source)
        source.write_note(run.cache.dir, fingerprint)
        use(run.cache.dir / fingerprint.folder_name)
        if skip_unusable:
            records = leave_out_unusable(records, find_unusable(run, fingerprint, records), notes.append)
        images = find_images(run, fingerprint, records, trust_plan=trust_plan)
        found = cls(run, fingerprint, records, images, source, model_folder, processor, use, notes=tuple(notes))
        return in_context(found) if skip_unusable else found

    @classmethod
    def from_cache(cls, run: RunFile, once: Once = at_once, timed: Timed = untimed, use: Use = unclaimed) -> RunInputs:
        """Read the records and open the model; take the rest from the cache, so that training needs nothing else.

        Image keys come from the cache's plan (`cached_images`), and the fingerprint from what was recorded for these
        files of the model, so neither images nor the tower are read. `once` calls a function on the first rank and
        returns its result on all. `timed` times a part of the work, by its name. `use` claims the cache.

        Raises:
            LookonceError: records, model or cache are missing or broken, or the plan lacks images.
        """
        notes: list[str] = []
        with timed("read records"):
            records = read_splits(run, notes.append)
        source = source_of(run)
        with timed("find image keys"):
            fingerprint = once(lambda: fingerprint_of(source, run.cache.dir))
            use(run.cache.dir / fingerprint.folder_name)
            unusable = once(lambda: find_unusable(run, fingerprint, records))
            records = leave_out_unusable(records, unusable, notes.append)
            images = once(lambda: cached_images(run, fingerprint, records, notes.append))
        with timed("open model folder"):
            model_folder, processor, _ = open_model(source, fingerprint)
        found = cls(run, fingerprint, records, images, source, model_folder, processor, use, notes=tuple(notes))
        return in_context(found)

    @classmethod
    def of_model(cls, run: RunFile) -> RunInputs:
        """Open the model alone, without records, for questions that are not the run's.

        Raises:
            ModelError: there is no such model, or it is broken.
        """
        source = source_of(run)
        fingerprint = fingerprint_of(source, run.cache.dir)
        model_folder, processor, _ = open_model(source, fingerprint)
        records: dict[str, list[Record]] = {split: [] for split in SPLITS}
        return cls(run, fingerprint, records, ImageIndex({}, {}), source, model_folder, processor)

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
        with using(self.cache_folder, "lookonce cache plan", self.run.cache.claim_s):
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

    def open_cache(self, notify: Notify = quiet) -> VisionCache:
        """Open this run's cache, which must have the features of all its images; `notify` gets why a copy is not used.

        Raises:
            CacheError: the cache does not exist, or it lacks images; names the first one and a record with it.
        """
        options, keys = self.run.cache, self.images.path_of
        if options.stage:
            self.use(options.stage / self.fingerprint.folder_name)
        staged = options.stage and find_staged(
            options.stage, self.fingerprint, keys, check=options.check, notify=notify
        )
        cache = staged or find_cache(options.dir, self.fingerprint, check=options.check)
        missing = {path for path, key in self.images.key_of.items() if key not in cache} | self.images.unusable.keys()
        if missing:
            path, origin = next(
                (path, record.origin) for record in self.all_records() for path in record.images if path in missing
            )
            reason = self.images.unusable.get(path)
            if reason is None and (failure := cache.failed.get(self.key_of(path))):
                reason = failure.reason
            advice = f"it is quarantined ({reason}); {UNUSABLE_ADVICE}" if reason else f"run: {BUILD_COMMAND}"
            raise FeaturesMissing(
                f"{cache.folder} lacks the features of {len(missing)} of {self.images.num_files} images, "
                f"the first being {path} ({origin}): {advice}"
            )
        return cache

    def identity(self) -> dict[str, Any]:
        """Hashes of what a training depends on: the model, the cache's fingerprint, training and validation records.

        The test split is not among them.

        Raises:
            ImageError: an image cannot be read.
        """
        self._refuse_unusable()
        return self.model_identity() | self.cheap_identity()

    def model_identity(self) -> dict[str, str]:
        """The hash of the language model alone, which is kept beside the caches: computing it reads all weights."""
        return {"language_model": self.source.language_model_hash(self.run.cache.dir)}

    def _refuse_unusable(self) -> None:
        for record in self.all_records():
            for path in record.images:
                if path in self.images.unusable:
                    raise ImageError(
                        f"{len(self.images.unusable)} of {self.images.num_files} images cannot be read; the first is "
                        f"used by {record.origin}: {self.images.unusable[path]}; {UNUSABLE_ADVICE}"
                    )
