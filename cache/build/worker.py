"""Build a cache: plan it, then build each unfinished shard, beside any number of other workers; report what was done.

Design: the unit of work is a shard, and there is no coordinator. Every worker reads the plan, claims a shard, encodes
and writes it, writes its receipt, and claims the next. Each starts at a different shard. A worker with nothing left to
claim waits for the others and takes over from any that dies. A killed worker loses its current shard and at most
`MAX_ON_DEVICE` tower batches of the next one.

SIGUSR1 announces a stop (`--signal=B:USR1@120`), so the current shard is finished first. SIGTERM means that a kill
follows within seconds, so the current shard is dropped; so does a second signal of either kind.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from lookonce.cache.build.encode import EncodedBatch, Encoder
from lookonce.cache.build.progress import Finished, ensure_plan, pending_shards, planned_images
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.claims import Claims, sweep, using
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    QUARANTINE,
    Shard,
    ensure_manifest,
    finished_shards,
    has_receipt,
    read_receipts,
    write_quarantine,
)
from lookonce.cache.store.reader import VisionCache, read_index, write_index
from lookonce.cache.store.shards import ShardWriter, Stopwatch, remove_leftovers
from lookonce.claim_file import EXPIRY_S, Process
from lookonce.datasets.images import ImageIndex
from lookonce.disk_space import check_room, disk_full
from lookonce.errors import DiskFull, Stopped
from lookonce.files import is_full
from lookonce.signals import RESUME, handle_signals
from lookonce.text import count, duration, size

NUM_NAMED = 5
POLL_S = 5
"""How often a worker with nothing to claim checks whether others have finished or died."""


class StopSignals(contextlib.ExitStack):
    """Records the signals that ask to stop; a context manager that restores the previous handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        """Name of the first signal; empty if none came. No further shard is started then."""
        self.now = False
        """Whether to drop the current shard too."""
        self.enter_context(handle_signals(self._record))

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.now = bool(self.name) or number != signal.SIGUSR1
        self.name = self.name or signal.Signals(number).name


@dataclass(frozen=True)
class BuildReport:
    """What `build_cache` did, and the state of the cache after it."""

    folder: Path
    num_wanted: int
    """Number of images, variants included."""
    num_variants: int
    num_encoded: int
    num_by_others: int
    num_reused: int
    """Number of images that were stored before."""
    num_missing: int
    """Number of images that other workers are still encoding; 0 if the cache is complete."""
    quarantined: dict[str, str]
    """Reasons why wanted images have no features, by key, or by file if the file cannot be read."""
    num_shards: int
    size_bytes: int
    seconds: float
    phases: dict[str, float]
    """Busy seconds by kind of work; they overlap."""

    def text(self) -> str:
        parts = [f"encoded {count(self.num_encoded, 'image')} in {duration(self.seconds)}"]
        if not self.num_encoded:
            parts = ["nothing new encoded"]
        if self.num_by_others:
            parts.append(f"{self.num_by_others:,} by other workers")
        if self.num_reused or not self.num_encoded:
            parts.append(f"{self.num_reused:,} of {count(self.num_wanted, 'image')} reused")
        if self.num_variants:
            parts.append(f"{self.num_variants:,} of {self.num_wanted:,} are variants")
        failed = count(len(self.quarantined), "image")
        state = f"complete but for {failed}" if self.quarantined else "complete"
        if self.num_missing:
            state = f"{count(self.num_missing, 'image')} being encoded by other workers"
        content = f"{count(self.num_shards, 'shard')}, {size(self.size_bytes)}"
        lines = [f"cache {self.folder}: {', '.join(parts)}; {content}; {state}"]
        if self.quarantined:
            lines.append(f"{failed} could not be encoded (see {self.folder / QUARANTINE}):")
            lines += [f"  {reason}" for reason in list(self.quarantined.values())[:NUM_NAMED]]
        return "\n".join(lines)


@dataclass(frozen=True)
class BuildOptions:
    """How to build. Only `shard_bytes` changes what is built: how images are cut into shards."""

    shard_bytes: int = 2048 * 10**6
    provenance: Mapping[str, Any] = field(default_factory=dict)
    worker: tuple[int, int] | None = None
    """Number of this worker and number of all; decides with which shard it starts."""
    wait: bool = True
    """When nothing is left to claim, wait for the other workers and take over from those that die."""
    retry_quarantined: bool = False
    expiry_s: float = EXPIRY_S
    """A claim without a heartbeat for this long is dead."""


def build_cache(
    root: Path,
    fingerprint: Fingerprint,
    processor: ImageProcessor,
    images: ImageIndex,
    load_tower: Callable[[], Tower],
    options: BuildOptions,
) -> BuildReport:
    """Encode those of `images` that the cache below `root` lacks.

    `load_tower` is called only if there is something to encode. Safe to interrupt, to run again, and to run several
    times at once.

    Raises:
        CacheMismatch: the folder of this fingerprint holds another one.
        CacheError: a repair or a garbage collection is changing the folder.
        DiskFull: there is no room; finished shards are kept.
        Stopped: a signal asked to stop.
    """
    folder = root / fingerprint.folder_name
    build: _Build | None = None
    try:
        with using(folder, "lookonce cache build", options.expiry_s):
            ensure_manifest(folder, fingerprint, options.provenance)
            planned = planned_images(images, processor)
            # Unreadable files are retried only without `worker`: otherwise each new worker would plan them again.
            retry = {"retry_unread": options.worker is None, "retry_quarantined": options.retry_quarantined}
            plan = ensure_plan(folder, planned, fingerprint, options.shard_bytes, images.former, **retry)
            finished = Finished.of(read_receipts(folder), **retry)
            shards = pending_shards(plan, finished, images.path_of, images.former)
            files = images.former | images.path_of

            def load(stopwatch: Stopwatch) -> Encoder:
                return Encoder(files, processor, load_tower(), fingerprint, stopwatch)

            build = _Build(folder, fingerprint, options, shards, load)
            build.run()
            return build.report(images, finished.images)
    except OSError as error:
        if not is_full(error):
            raise
        raise disk_full(folder, build.bytes_left() if build else 0, error) from None


class _Build:
    """One worker's share in building some shards."""

    def __init__(
        self,
        folder: Path,
        fingerprint: Fingerprint,
        options: BuildOptions,
        shards: list[Shard],
        load: Callable[[Stopwatch], Encoder],
    ) -> None:
        self.folder, self.fingerprint, self.options, self._load = folder, fingerprint, options, load
        self._stopwatch, self._started = Stopwatch(), time.perf_counter()
        self._built: list[Shard] = []
        number, total = options.worker or (0, 1)
        first = number % total * len(shards) // total  # a different one for each worker
        self._shards = shards[first:] + shards[:first]

    def run(self) -> None:
        """Build shards until none is left.

        Raises:
            DiskFull: there is no room for another shard.
            Stopped: a signal asked to stop.
        """
        worker = Process.this("/".join(map(str, self.options.worker or ())))
        check_room(self.folder, self.bytes_left())
        with StopSignals() as self._stop, Claims(self.folder, worker, self.options.expiry_s) as self._claims:
            num_images = sum(len(shard.images) for shard in self._unfinished())
            self._bar = tqdm(total=num_images, desc="encode images", unit="image", disable=None if num_images else True)
            with self._bar:
                self._build_all()
        sweep(self.folder, self.options.expiry_s)

    def report(self, images: ImageIndex, finished: set[str]) -> BuildReport:
        """Update index and quarantine, and report; the images `finished` were done before."""
        folder, seconds = self.folder, time.perf_counter() - self._started
        if self._built or read_index(folder, self.fingerprint.sha256) is None:
            write_index(folder, self.fingerprint.sha256)
        cache = VisionCache.open(folder)
        write_quarantine(folder, cache.failed, images.unusable)
        encoded = {key for shard in self._built for key in shard.keys if key in cache}
        image_keys = set(images.path_of)
        stored = {key for key in image_keys if key in cache}
        failed = {key: cache.failed[key].reason for key in image_keys - stored if key in cache.failed}
        images_of = {key: images.variants[key].of if key in images.variants else key for key in failed}
        return BuildReport(
            folder=folder,
            num_wanted=len(image_keys),
            num_variants=len(images.variants),
            num_encoded=len(encoded & image_keys),
            num_by_others=len(stored - finished - encoded),
            num_reused=len(stored & finished - encoded),
            num_missing=len(image_keys - stored - failed.keys()),
            quarantined={images_of[key]: reason for key, reason in failed.items()}
            | {str(path): reason for path, reason in images.unusable.items()},
            num_shards=cache.num_shards,
            size_bytes=cache.size_bytes,
            seconds=seconds,
            phases={name: round(value, 3) for name, value in self._stopwatch.seconds().items()},
        )

    def bytes_left(self) -> int:
        return self._bytes(self._unfinished())

    def _build_all(self) -> None:
        encoder: Encoder | None = None
        try:
            while self._unfinished():
                claimed = self._claim()
                first = next(claimed, None)
                if first:
                    encoder = encoder or self._load(self._stopwatch)
                    self._write_shards(encoder.run(itertools.chain([first], claimed)))
                self._raise_if_stopped()
                if first is None:
                    if not self.options.wait:
                        return
                    time.sleep(min(POLL_S, self.options.expiry_s / 4))
        except (EOFError, ConnectionError) as error:  # while it handed over pixels
            error.add_note("a worker process that decodes images was killed")
            raise
        finally:
            if encoder:
                encoder.close()

    def _claim(self) -> Iterator[Shard]:
        """Claim the shards that no other worker has, each when it is drawn."""
        for shard in self._unfinished():
            if self._stop.name:
                return
            if has_receipt(self.folder, shard.name) or not self._claims.take(shard.name, len(shard.images)):
                continue
            if has_receipt(self.folder, shard.name):  # finished since we checked
                self._release(shard)
                continue
            try:
                check_room(self.folder, self._bytes([shard]))
            except DiskFull:
                if len(self._claims.held) == 1:
                    raise
                self._release(shard)
                return  # finish the current shard first
            remove_leftovers(self.folder, shard.name)
            yield shard

    def _write_shards(self, encoded: Iterator[EncodedBatch]) -> None:
        for batch in encoded:
            shard = batch.shard
            with ShardWriter(self.folder, shard.name, self.fingerprint, len(shard.images), self._stopwatch) as writer:
                self._write(writer, _rest_of_shard(batch, encoded))
                try:
                    with self._stopwatch.measure("flush"):
                        self._built += [shard] if writer.commit() else []
                except FileNotFoundError:
                    if self._claims.held[shard.name].is_held():
                        raise  # else this process was suspended until another took over and removed our file
            self._release(shard)
            self._raise_if_stopped()

    def _write(self, writer: ShardWriter, batches: Iterator[EncodedBatch]) -> None:
        num_done = 0
        for batch in batches:
            if self._stop.now:
                self._raise_if_stopped()
            writer.add(batch.images)
            writer.failed |= batch.failed
            num_done += len(batch.images) + len(batch.failed)
            self._claims.held[batch.shard.name].update(num_done)
            self._bar.update(len(batch.images) + len(batch.failed))

    def _release(self, shard: Shard) -> None:
        self._claims.release(self._claims.held[shard.name])

    def _unfinished(self) -> list[Shard]:
        finished = set(finished_shards(self.folder))
        return [shard for shard in self._shards if shard.name not in finished]

    def _bytes(self, shards: list[Shard]) -> int:
        return sum(shard.num_tokens for shard in shards) * self.fingerprint.bytes_per_token

    def _raise_if_stopped(self) -> None:
        if self._stop.name and (unfinished := self._unfinished()):
            raise Stopped(
                f"stopped by {self._stop.name} after {count(len(self._built), 'shard')}, {len(unfinished):,} of "
                f"{len(self._shards):,} are left; {RESUME}"
            )


def _rest_of_shard(batch: EncodedBatch, batches: Iterator[EncodedBatch]) -> Iterator[EncodedBatch]:
    yield batch
    while not batch.is_last:
        batch = next(batches)
        yield batch
