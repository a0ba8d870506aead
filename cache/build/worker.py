"""Build a cache: plan it, then build each unfinished shard, beside any number of other workers.

Design: the unit of work is a shard, and there is no coordinator. Every worker reads the plan, claims a shard, encodes
and writes it, writes its receipt, and claims the next. Each starts at a different shard, so they seldom want the same
one. When nothing is left to claim, a worker waits for the others and takes over from any that dies, so the cache is
completed as long as one worker lives. A killed worker loses its current shard and at most `MAX_ON_DEVICE` tower batches
of the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.cache.build.encode import EncodedBatch, Encoder
from lookonce.cache.build.planner import Finished, ensure_plan, pending_shards, planned_images
from lookonce.cache.build.preemption import StopSignals
from lookonce.cache.build.report import BuildReport, report
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.claims import Claim, Claims, using
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.leftovers import sweep
from lookonce.cache.store.manifest import ensure_manifest
from lookonce.cache.store.plan import Shard
from lookonce.cache.store.receipts import finished_shards, has_receipt
from lookonce.cache.store.shards import ShardWriter, remove_leftovers
from lookonce.cache.store.stopwatch import Stopwatch
from lookonce.claim_file import EXPIRY_S, Process
from lookonce.datasets.images import ImageIndex
from lookonce.disk_space import check_room, disk_full
from lookonce.errors import DiskFull, Stopped
from lookonce.files import is_full
from lookonce.signals import RESUME
from lookonce.text import count

POLL_S = 5
"""How often a worker with nothing to claim checks whether others have finished or died."""
SIGNAL_DELAY_S = 0.2
"""A signal to the process group may reach this process at most this long after a decoding process."""
DEAD_PROCESS = (RuntimeError, EOFError, ConnectionError, FileNotFoundError)
"""What torch raises when a decoding process has ended: the last three while it hands over pixels."""
MAX_UNWRITTEN = 2
"""At most this many tower batches wait for the disk."""


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

    @property
    def retries(self) -> dict[str, bool]:
        """Which failed images to try again. Unreadable files are retried only without `worker`: otherwise each new
        worker would plan them again."""
        return {"retry_unread": self.worker is None, "retry_quarantined": self.retry_quarantined}


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
            wanted, retry = planned_images(images, processor), options.retries
            plan = ensure_plan(folder, wanted, fingerprint, options.shard_bytes, images.former, **retry)
            finished = Finished.read(folder, **retry)
            shards = pending_shards(plan, finished, images.path_of, images.former)
            start = time.perf_counter()
            build = _Build(folder, fingerprint, processor, images.former | images.path_of, load_tower, options, shards)
            build.run()
            seconds = time.perf_counter() - start
            return report(folder, fingerprint, images, finished.images, build.built, build.stopwatch.seconds(), seconds)
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
        processor: ImageProcessor,
        files: Mapping[str, Path],
        load_tower: Callable[[], Tower],
        options: BuildOptions,
        shards: list[Shard],
    ) -> None:
        self.folder, self.fingerprint, self.options = folder, fingerprint, options
        self.stopwatch = Stopwatch()
        self.built: list[Shard] = []
        """The shards that this worker has finished."""
        self._shards = _rotated(shards, options.worker)
        self._load: Callable[[], Encoder]
        self._load = lambda: Encoder(files, processor, load_tower(), fingerprint, self.stopwatch)
        self._claimed: dict[str, Claim] = {}

    def run(self) -> None:
        """Build shards until none is left.

        Raises:
            DiskFull: there is no room for another shard.
            Stopped: a signal asked to stop.
        """
        worker = Process.this("/".join(map(str, self.options.worker or ())))
        check_room(self.folder, self.bytes_left())
        with StopSignals() as self._stop, Claims(self.folder, worker, self.options.expiry_s) as self._claims:
            self._bar = self._progress()
            with self._bar:
                self._build_all()
        sweep(self.folder, self.options.expiry_s)

    def bytes_left(self) -> int:
        """Bytes of the unfinished shards."""
        return self._bytes(self._unfinished())

    def _build_all(self) -> None:
        encoder: Encoder | None = None
        try:
            while self._unfinished():
                claimed = self._claim()
                first = next(claimed, None)
                if first:
                    encoder = encoder or self._load()
                    self._write_shards(encoder.run(itertools.chain([first], claimed)))
                self._raise_if_stopped()
                if first is None:
                    if not self.options.wait:
                        return
                    time.sleep(min(POLL_S, self.options.expiry_s / 4))
        except DEAD_PROCESS as error:
            # A signal to the process group ends the decoding processes too, and torch then raises in this one, at any
            # point, even while a writer cleans up.
            time.sleep(SIGNAL_DELAY_S)
            for name, claim in self._claimed.items():
                if claim.is_held():  # else its new holder is writing there
                    remove_leftovers(self.folder, name)
            self._raise_if_stopped()
            if isinstance(error, EOFError | ConnectionError):
                error.add_note("a worker process that decodes images was killed")
            raise
        finally:
            if encoder:
                with contextlib.suppress(*DEAD_PROCESS):  # which would hide a signal that is already named
                    encoder.close()

    def _claim(self) -> Iterator[Shard]:
        """Claim the shards that no other worker has, each when it is drawn."""
        for shard in self._unfinished():
            if self._stop.soon:
                return
            if has_receipt(self.folder, shard.name):
                continue
            claim = self._claims.take(shard.name, len(shard.images))
            if claim is None:
                continue
            self._claimed[shard.name] = claim
            if has_receipt(self.folder, shard.name):  # finished since we checked
                self._release(shard)
                continue
            try:
                check_room(self.folder, self._bytes([shard]))
            except DiskFull:
                if len(self._claimed) == 1:
                    raise
                self._release(shard)
                return  # finish the current shard first
            remove_leftovers(self.folder, shard.name)
            yield shard

    def _write_shards(self, encoded: Iterator[EncodedBatch]) -> None:
        """Write encoded batches, shard by shard."""
        for batch in encoded:
            shard = batch.shard
            with ShardWriter(self.folder, shard.name, self.fingerprint, len(shard.images), self.stopwatch) as writer:
                self._write(writer, _rest_of_shard(batch, encoded))
                with self.stopwatch.measure("flush"):
                    if self._commit(writer, shard):
                        self.built.append(shard)
            self._release(shard)
            self._raise_if_stopped()

    def _commit(self, writer: ShardWriter, shard: Shard) -> bool:
        """Finish a shard; False if another worker has finished it or taken it over."""
        try:
            return writer.commit()
        except FileNotFoundError:
            if self._claimed[shard.name].is_held():
                raise
            return False  # this process was suspended so long that another took over and removed our file

    def _write(self, writer: ShardWriter, batches: Iterator[EncodedBatch]) -> None:
        unwritten: deque[list[Future[None]]] = deque()
        num_done = 0
        for batch in batches:
            if self._stop.now:
                self._raise_if_stopped()
            unwritten.append(writer.add(batch.images))
            writer.failed |= batch.failed
            with self.stopwatch.measure("wait for the disk"):
                while len(unwritten) > MAX_UNWRITTEN:
                    for write in unwritten.popleft():
                        write.result()
            num_done += len(batch.images) + len(batch.failed)
            self._claimed[batch.shard.name].update("encoding", num_done)
            self._bar.update(len(batch.images) + len(batch.failed))

    def _release(self, shard: Shard) -> None:
        self._claims.release(self._claimed.pop(shard.name))

    def _unfinished(self) -> list[Shard]:
        finished = set(finished_shards(self.folder))
        return [shard for shard in self._shards if shard.name not in finished]

    def _bytes(self, shards: list[Shard]) -> int:
        return sum(shard.num_tokens for shard in shards) * self.fingerprint.bytes_per_token

    def _raise_if_stopped(self) -> None:
        if self._stop.name and (left := self._unfinished()):
            raise Stopped(
                f"stopped by {self._stop.name} after {count(len(self.built), 'shard')}, {len(left):,} of "
                f"{len(self._shards):,} are left; {RESUME}"
            )

    def _progress(self) -> Any:
        num_images = sum(len(shard.images) for shard in self._unfinished())
        return tqdm(total=num_images, desc="encode images", unit="image", disable=None if num_images else True)


def _rest_of_shard(batch: EncodedBatch, others: Iterator[EncodedBatch]) -> Iterator[EncodedBatch]:
    yield batch
    while not batch.is_last:
        batch = next(others)
        yield batch


def _rotated(shards: list[Shard], worker: tuple[int, int] | None) -> list[Shard]:
    """The shards, starting at a different one for each worker."""
    number, total = worker or (0, 1)
    first = number % total * len(shards) // total
    return shards[first:] + shards[:first]
