"""Open a run: claim what the command changes, then read once what it needs.

Design: each command that works with a run says in `Needs` what it takes of it and what it changes, so none can forget a
claim. The run folder is claimed before anything that another process may change is read, and the cache before anything
in it is. Neither torch nor the model is imported unless the model is asked for, or its fingerprint has not been
recorded: so `lookonce status` answers in half a second. The model is located once and used as a folder, because a
branch on the Hub may move in between, and the fingerprint of one commit must not be recorded for another.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from lookonce.cache.format import BUILD_COMMAND
from lookonce.cache.store.fingerprint import Fingerprint, Source
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.datasets.augment import EpochVariants
from lookonce.datasets.balance import record_weights
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.records import Record
from lookonce.environment import limit_cpu_threads
from lookonce.errors import FeaturesMissing, ImageError, RecordsError, UsageError
from lookonce.files import hash_file
from lookonce.hub import locate
from lookonce.run.config import RunFile, read_run_file
from lookonce.run.folder import RECORD, RunClaim, RunFolder
from lookonce.run.records import UNUSABLE_ADVICE, cached_images, find_images, read_splits, with_contexts, without_fold
from lookonce.run.sections import ContextSection, DataSection, ModelSection
from lookonce.settings import checked, set_key
from lookonce.text import Notify, count, quiet, shell

if TYPE_CHECKING:
    from lookonce.cache.build.estimate import Estimate
    from lookonce.cache.build.worker import BuildReport
    from lookonce.cache.model.model_folder import ModelFolder
    from lookonce.cache.model.pixels import ImageProcessor
    from lookonce.cache.model.tower import Tower
    from lookonce.train.data.batches import FeatureSource, RowCollator
    from lookonce.train.data.tokenize import ChatTokenizer, Example

Once = Callable[[Callable[[], Any]], Any]
"""Calls a function in one of several processes and returns its result in all of them."""
Timed = Callable[[str], AbstractContextManager[Any]]
MEGABYTE = 1_000_000
PIXEL_SETTINGS = {"backend", "min_pixels", "max_pixels"}
FEATURE_SETTINGS = {*PIXEL_SETTINGS, "dtype"}
"""The keys of the section `cache` that change the fingerprint."""


@dataclass(frozen=True)
class Needs:
    """What a command takes of a run, and what of it the command changes."""

    command: str
    """How claims name it: "lookonce train"."""
    writes: bool = False
    """The run folder is changed, so it is claimed."""
    adapter: bool = False
    """The trained adapter in the run folder, which must be undamaged."""
    recorded: bool = False
    """The run is the one that its folder records, whatever the run file says by now."""
    records: Literal["none", "all", "used"] = "none"
    """`used`: as training and evaluation use them: with contexts, and the fold of `data.held_out` apart."""
    images: Literal["none", "hashed", "planned", "cached"] = "none"
    """The images of the records. `hashed`: all are read. `planned`: only those that the cache's plan does not name.
    `cached`: the same, and the plan must know the content of all; no image file need exist."""
    model: Literal["none", "fingerprint", "open"] = "none"
    """`fingerprint`: which cache is the run's. `open`: the same, the model folder and its image processor."""
    cache: bool = False
    """The features of all images. The cache is claimed, so that nothing is removed from it meanwhile."""
    variants: bool = False
    """The variants of training images (`cache.augment`) count as images, and training takes them."""
    is_local: bool = False


TO_BUILD = Needs("lookonce cache build", records="all", images="hashed", variants=True, model="open")
TO_BUILD_BY_PLAN = replace(TO_BUILD, images="planned")
FROM_CACHE = Needs("lookonce", records="used", images="cached", model="open", cache=True)
TO_TRAIN = replace(FROM_CACHE, command="lookonce train", writes=True, variants=True)
TO_EVALUATE = replace(FROM_CACHE, command="lookonce eval", writes=True, adapter=True)
TO_ANSWER = Needs("lookonce predict", adapter=True, model="open")
TO_MEASURE = Needs("lookonce bench", records="used", images="hashed", model="open", cache=True)
TO_LOOK = Needs("lookonce status", records="all", images="planned", variants=True, model="fingerprint")


@dataclass(eq=False)
class OpenRun:
    """A run that is open: its file, and the parts that its `needs` name; a context manager that releases its claims.

    `records` are by split: train, val, test, and held_out with `data.held_out`; one that the run file does not name is
    empty. `source` has the files and settings that the `fingerprint` was computed from.
    """

    run: RunFile
    folder: RunFolder
    owner: RunClaim
    needs: Needs
    notify: Notify = quiet
    notes: list[str] = field(default_factory=list)
    """What a user should know of how the records were read, such as those that were left out."""
    records: dict[str, list[Record]] = field(init=False)
    images: ImageIndex = field(init=False)
    source: Source = field(init=False)
    fingerprint: Fingerprint = field(init=False)
    model_folder: ModelFolder = field(init=False)
    processor: ImageProcessor = field(init=False)

    def __enter__(self) -> Self:
        return self

    def changed(self, **parts: Any) -> Self:
        """The same open run with other parts, such as `records`; the claims are shared."""
        other = copy.copy(self)
        for name, value in parts.items():
            setattr(other, name, value)
        return other

    def __exit__(self, *_: object) -> None:
        self.owner.__exit__()

    @property
    def cache_folder(self) -> Path:
        return self.run.cache.dir / self.fingerprint.folder_name

    @property
    def shard_bytes(self) -> int:
        return self.run.cache.shard_mb * MEGABYTE

    def all_records(self) -> Iterator[Record]:
        return chain.from_iterable(self.records.values())

    def key_of(self, path: Path) -> str:
        return self.images.key_of[path]

    # What follows from the parts.

    @cached_property
    def cache(self) -> VisionCache:
        """The run's cache, which has the features of all its images; see `open_cache`."""
        return self.open_cache()

    def open_cache(self) -> VisionCache:
        """This run's cache, or its complete copy in `cache.stage`; `notify` gets why a copy is not used.

        Raises:
            CacheError: the cache does not exist, or it lacks images; names the first one and a record with it.
        """
        from lookonce.cache.maintenance.staging import find_staged

        options, keys = self.run.cache, self.images.path_of
        if options.stage:
            self.owner.use_cache(options.stage / self.fingerprint.folder_name)
        staged = options.stage and find_staged(options.stage, self.fingerprint, keys, notify=self.notify)
        cache = staged or find_cache(options.dir, self.fingerprint)
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
        variants = self.images.variants
        if lacking := [variant for key, variant in variants.items() if key not in cache]:
            failure = cache.failed.get(lacking[0].key)
            advice = f"it is quarantined ({failure.reason})" if failure else f"run: {BUILD_COMMAND}"
            raise FeaturesMissing(
                f"{cache.folder} lacks {len(lacking)} of {count(len(variants), 'variant')} of images (cache.augment), "
                f"the first being {lacking[0].text(str(keys[lacking[0].of]))}: {advice}"
            )
        return cache

    @property
    def variants(self) -> EpochVariants | None:
        """Which variants of images a training shows; None without `cache.augment`."""
        augment = self.run.cache.augment if self.needs.variants else None
        return EpochVariants(augment, self.run.train.seed) if augment else None

    @cached_property
    def chat_tokenizer(self) -> ChatTokenizer:
        from lookonce.train.data.tokenize import ChatTokenizer

        return ChatTokenizer(self.model_folder.folder, self.model_folder.config, self.run.data.enable_thinking)

    @cached_property
    def features(self) -> FeatureSource:
        """The features of the cache; `changed` may give others."""
        from lookonce.train.data.batches import CachedFeatures

        return CachedFeatures(self.cache)

    def row_collator(self, source: FeatureSource | None = None) -> RowCollator:
        """What makes batches of padded rows, with features of the cache or of another `source`."""
        from lookonce.train.data.batches import RowCollator

        return RowCollator.of(self.chat_tokenizer, source or self.features)

    def examples(self, split: str) -> tuple[list[Example], int]:
        """The examples of a split, and how many records were left out as too long."""
        from lookonce.train.data.tokenize import make_examples

        batch = self.run.batch
        order, balance = (batch.stage_order, batch.balance) if split == "train" else (None, None)
        inputs = self.chat_tokenizer, self.records[split], self.key_of, self.cache.grid_thw
        return make_examples(*inputs, batch.longest_record, split, batch.limiting_key, order, balance)

    def questions(self, split: str) -> tuple[list[tuple[Record, int]], list[Example], int]:
        """The questions of a split as a training by rewards asks them: record and turn of each, its prompt, and how
        many were left out as too long with an answer.

        Raises:
            RecordsError: none is left.
        """
        asked = [(record, turn) for record in self.records[split] for turn in range(len(record.turns))]
        most = self.run.batch.longest_record - self.run.grpo.max_new_tokens
        kept = [
            (question, prompt)
            for question, prompt in zip(asked, self.prompts(asked), strict=True)
            if prompt.num_tokens <= most
        ]
        if not kept:
            raise RecordsError(
                f"none of {count(len(asked), 'question')} of {split} leaves room for an answer of "
                f"{self.run.grpo.max_new_tokens:,} tokens in {self.run.batch.longest_record:,}; lower "
                f"`grpo.max_new_tokens`, raise `{self.run.batch.limiting_key}`, or lower `cache.max_pixels`"
            )
        questions, prompts = zip(*kept, strict=True)
        return [*questions], [*prompts], len(asked) - len(kept)

    def prompts(self, questions: Sequence[tuple[Record, int]]) -> list[Example]:
        """The prompts of some turns of records, without their answers."""
        prompts = []
        for record, turn in questions:
            keys = [self.key_of(path) for path in record.images]
            grids = [self.cache.grid_thw(key) for key in keys]
            prompts.append(self.chat_tokenizer.question(record, turn, keys, grids))
        return prompts

    # By what a run folder recognises its run.

    def identity(self) -> dict[str, Any]:
        """Hashes of what a training depends on: the model, the cache's fingerprint, training and validation records.

        The test split is not among them.

        Raises:
            ImageError: an image cannot be read.
        """
        for record in self.all_records():
            for path in record.images:
                if path in self.images.unusable:
                    raise ImageError(
                        f"{len(self.images.unusable)} of {self.images.num_files} images cannot be read; the first is "
                        f"used by {record.origin}: {self.images.unusable[path]}; {UNUSABLE_ADVICE}"
                    )
        return self.model_identity() | self.records_identity()

    def model_identity(self) -> dict[str, str]:
        """The hash of the language model, which is kept beside the caches: computing it reads all weights."""
        return {"language_model": self.source.language_model_hash(self.run.cache.dir)}

    def records_identity(self) -> dict[str, Any]:
        """The entries that do not need the model; every image must have a key."""
        batch, context, train, val = self.run.batch, self.run.data.context, self.records["train"], self.records["val"]
        identity: dict[str, Any] = {
            "cache": self.fingerprint.sha256,
            "records": {"train": hash_records(train, self.key_of), "val": hash_records(val, self.key_of)},
        }
        if order := batch.stage_order:
            identity["stages"] = _hash_repr([order.stage_of(record) for record in train])
        if batch.balance:
            identity["weights"] = _hash_repr(record_weights(train, batch.balance))
        if context:
            identity["context"] = _hash_repr([context.stage_of(record) for record in [*train, *val]])
        return identity | answers_identity(context)

    # Building the cache.

    def estimate(self, num_pilot: int) -> Estimate:
        """What `build` would do; after encoding `num_pilot` images, also how long it would take."""
        from lookonce.cache.build.estimate import estimate

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
        from lookonce.cache.build.progress import ensure_plan, planned_images
        from lookonce.cache.store.claims import using
        from lookonce.cache.store.metadata import ensure_manifest

        with using(self.cache_folder, "lookonce cache plan", self.run.cache.claim_s):
            ensure_manifest(self.cache_folder, self.fingerprint, self._provenance())
            planned = planned_images(self.images, self.processor)
            ensure_plan(self.cache_folder, planned, self.fingerprint, self.shard_bytes)
        self.source.write_note(self.run.cache.dir, self.fingerprint)  # its folder may not have existed before

    def load_tower(self, *, fast: bool | None = None) -> Tower:
        from lookonce.cache.model.tower import Tower
        from lookonce.environment import best_device

        return Tower(self.model_folder, self.fingerprint.storage.compute, best_device(), fast=fast)

    def build(
        self,
        worker: tuple[int, int] | None = None,
        *,
        images: ImageIndex | None = None,
        wait: bool = True,
        retry_quarantined: bool = False,
    ) -> BuildReport:
        """Encode the images that the cache lacks, together with any number of other workers; by default of the run."""
        from lookonce.cache.build.worker import BuildOptions, build_cache

        root, settings = self.run.cache.dir, (worker, wait, retry_quarantined, self.run.cache.claim_s)
        options = BuildOptions(self.shard_bytes, self._provenance(), *settings)
        report = build_cache(root, self.fingerprint, self.processor, images or self.images, self.load_tower, options)
        self.source.write_note(root, self.fingerprint)  # its folder may not have existed before
        return report

    def _provenance(self) -> dict[str, Any]:
        from lookonce.environment import device_name

        return {"model": self.run.model.path, "revision": self.run.model.revision, "device": device_name()}


def open_run(
    run_or_path: Path | RunFile,
    needs: Needs,
    assignments: Sequence[str] = (),
    *,
    once: Once = lambda function: function(),
    timed: Timed = nullcontext,
    notify: Notify = quiet,
) -> OpenRun:
    """Claim what a command changes of a run, then read what it needs.

    `run_or_path` is a run folder, a run file, or one that is read already; `assignments` such as
    "eval.max_new_tokens=8" replace its values. `once` calls a function on the first rank and returns its result on all.
    `timed` times a part of the work, by its name.

    Raises:
        LookonceError: the run folder is in use or holds another run, or a part is missing or broken.
    """
    folder, run = once(lambda: find_run(run_or_path, assignments, needs))
    opened = OpenRun(run, folder, RunClaim(folder.folder, needs.command, run.cache.claim_s), needs, notify)
    try:
        if needs.writes:
            once(opened.owner.take)
            opened.folder, opened.run = once(lambda: find_run(run_or_path, assignments, needs))  # as it is now
        if needs.adapter:
            once(opened.folder.check_adapter)
        _read(opened, once, timed)
    except BaseException:
        opened.__exit__()
        raise
    return opened


def _read(opened: OpenRun, once: Once, timed: Timed) -> None:
    needs, run, notify = opened.needs, opened.run, opened.notes.append
    records: dict[str, list[Record]] = {}
    if needs.records != "none":
        with timed("read records"):
            opened.records = records = read_splits(run, notify)
    if needs.model == "none":
        return
    opened.source = source = source_of(run, is_local=needs.is_local)  # before the model: a change is noticed later
    with timed("find image keys"):
        if needs.model == "open" and needs.images == "hashed":
            opened.model_folder, opened.processor, opened.fingerprint = open_model(source)
            source.write_note(run.cache.dir, opened.fingerprint)
        else:
            opened.fingerprint = once(lambda: fingerprint_of(source, run.cache.dir))
        folder, fingerprint = opened.cache_folder, opened.fingerprint
        if needs.cache:
            opened.owner.use_cache(folder)
        if needs.images == "cached":
            opened.images = once(lambda: cached_images(run, fingerprint, records, notify))
        elif needs.images != "none":
            opened.images = find_images(folder, records, trust_plan=needs.images == "planned")
    if needs.variants and run.cache.augment:
        opened.images = opened.images.with_variants(run.cache.augment, records["train"])
    if needs.records == "used":
        records = without_fold(run, records, opened.images, notify)
        opened.records = with_contexts(run, records, opened.images, notify)
    if needs.model == "open" and needs.images != "hashed":
        with timed("open model folder"):
            opened.model_folder, opened.processor, _ = open_model(source, fingerprint)
    if needs.cache:
        limit_cpu_threads(opened.model_folder.folder)


# Which run a command means.


def find_run(run_or_path: Path | RunFile, assignments: Sequence[str], needs: Needs) -> tuple[RunFolder, RunFile]:
    """The folder and the run file; if no adapter is needed, the folder of a run file need not hold a run.

    With "output=runs/b" in `assignments` a run file that does not lie in a run folder stands for the run in that
    folder; a run folder, or the copy of the run file in it, stands for that run alone.

    Raises:
        LookonceError: the folder holds no run that can be read, or another one than the run file describes; or
            `assignments` name another folder.
    """
    if isinstance(run_or_path, RunFile):
        return RunFolder(run_or_path.output), run_or_path
    run_or_path = RunFolder.find(run_or_path).folder if needs.recorded else run_or_path
    if not run_or_path.is_file():
        folder = RunFolder(run_or_path)
        run = folder.read_run()
        if not assignments:
            return folder, run
        values = run.model_dump(mode="json")
        for assignment in assignments:
            set_key(values, assignment)
        run = checked(values, RunFile, f"the run of {folder.folder} with --set")
    else:
        run = read_run_file(run_or_path, assignments)
        folder = RunFolder(run_or_path.parent if (run_or_path.parent / RECORD).exists() else run.output)
        if needs.adapter:
            folder.read_run()
    sets_output = any(assignment.partition("=")[0].strip() == "output" for assignment in assignments)
    if sets_output and run.output.resolve() != folder.folder.resolve():
        raise UsageError(
            f"--set output={run.output} cannot be used here: {run_or_path} stands for the run in {folder.folder}; "
            f"leave it out, or name the other run: {shell('lookonce', 'eval', run.output)}"
        )
    folder.check(run, {})
    return folder, run


def run_for_model(model: Path) -> RunFile:
    """A run file for a model folder, or a model of the Hub, of which nothing but the model is used."""
    no_data = DataSection.model_construct(train=[])  # a run file must name records, and none are read
    return RunFile(model=ModelSection(path=str(model)), data=no_data, output=Path("runs"))


# The model that a run starts from, and the fingerprint of its cache.


def source_of(run: RunFile, *, is_local: bool = False) -> Source:
    """The files and settings that the fingerprint of a run's cache is computed from; `is_local` downloads nothing.

    Raises:
        ModelError: there is no such model, or it is not on this machine.
    """
    folder = locate(run.model.path, run.model.revision, is_local=is_local)
    settings = run.cache.model_dump(mode="json", include=FEATURE_SETTINGS)
    return Source.of(folder, settings)


def open_model(source: Source, known: Fingerprint | None = None) -> tuple[ModelFolder, ImageProcessor, Fingerprint]:
    """The model folder, its image processor, and the fingerprint of the run's cache, computed unless it is `known`.

    Raises:
        ModelError: the model has no vision tower that is supported, or a file of it is broken.
    """
    from lookonce.cache.model.model_folder import ModelFolder
    from lookonce.cache.model.pixels import ImageProcessor

    pixels = {name: value for name, value in source.settings.items() if name in PIXEL_SETTINGS}
    model_folder, processor = ModelFolder.open(str(source.folder)), ImageProcessor(source.folder, **pixels)
    return model_folder, processor, known or Fingerprint.of(model_folder, processor, source.settings["dtype"])


def fingerprint_of(source: Source, root: Path) -> Fingerprint:
    """The fingerprint of a source as recorded in `root`, the folder of caches; else computed and recorded there."""
    if known := source.read_note(root):
        return known
    fingerprint = open_model(source)[-1]
    source.write_note(root, fingerprint)
    return fingerprint


# Hashes of what a training depends on. The cache's fingerprint covers the vision tower.


def _hash_repr(values: list[Any]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def hash_records(records: Iterable[Record], key_of: Callable[[Path], str]) -> str:
    """The sha256 over image keys, texts and order of some records."""
    digest = hashlib.sha256()
    for record in records:
        keys = [key_of(path) for path in record.images]
        digest.update(repr((keys, record.turns, record.system)).encode())
    return digest.hexdigest()


def answers_identity(context: ContextSection | None) -> dict[str, list[str] | None]:
    """The recorded input of the predictions that contexts have: the hash of each file that exists; None without any."""
    files = context.prediction_files if context else []
    return {"answers": [hash_file(path) for path in files if path.exists()] or None}
