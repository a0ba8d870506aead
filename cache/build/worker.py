"""Build a cache: plan it, then make each shard that is not there yet, beside any number of others who do the same.

Design: the unit of work is a shard, and there is no coordinator. Every worker reads the plan, claims a shard, makes it,
writes its receipt, and takes the next, beginning at a place of its own so that they seldom ask for the same one. When
nothing is left to claim it waits for those at work, to take over from any that dies; so the cache is complete as long
as one worker lives. A worker that is killed loses the shard in work, and of the next one the forwards that the device
had begun meanwhile.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.cache.build.encode import Encoded, Encoder
from lookonce.cache.build.planner import Settled, agree_on_plan, pending_shards, planned_images
from lookonce.cache.build.report import BuildReport, report
from lookonce.cache.build.preemption import StopSignals
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.claims import EXPIRY_S, Claim, Claims, Worker
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.manifest import settle
from lookonce.cache.store.leftovers import sweep
from lookonce.cache.store.plan import Shard
from lookonce.cache.store.receipts import finished_shards, has_receipt
from lookonce.cache.store.shards import ShardWriter, remove_leftovers
from lookonce.disk_space import check_room, disk_full
from lookonce.cache.store.stopwatch import Stopwatch
from lookonce.datasets.images import ImageIndex
from lookonce.errors import DiskFull, Stopped
from lookonce.files import is_full
from lookonce.text import count

POLL_S = 5
"""How often a worker without work looks whether others have finished or died."""
SIGNAL_S = 0.2
"""How long a signal that was sent to several processes may take to reach this one after another."""
MAX_UNWRITTEN = 2
"""Forwards whose features may wait for the disk."""


@dataclass(frozen=True)
class BuildOptions:
    """How to build, which changes nothing in what is built but the cut into shards."""

    shard_bytes: int = 2048 * 10**6
    provenance: Mapping[str, Any] = field(default_factory=dict)
    worker: tuple[int, int] | None = None
    """Number and total of workers that share the work: where this one begins."""
    wait: bool = True
    """When nothing is left to claim, wait for the others and take over from those that die."""
    retry_quarantined: bool = False
    expiry_s: float = EXPIRY_S
    """A claim that was not touched for so long is dead."""

    @property
    def retries(self) -> dict[str, bool]:
        """Which images without features to try again. Files that could not be read are left to a build that is none of
        several workers: else each worker that comes would plan them anew."""
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

    `load_tower` is called only if there is something to encode. Safe to interrupt, to run again, and to run as often
    as one likes at the same time.

    Raises:
        CacheMismatch: the folder of this fingerprint holds another one.
        DiskFull: there is no room; what is finished is kept.
        Stopped: a signal asked for it.
    """
    folder = root / fingerprint.folder_name
    work: _Build | None = None
    try:
        settle(folder, fingerprint, options.provenance)
        wanted, retry = planned_images(images, processor), options.retries
        plan = agree_on_plan(folder, wanted, fingerprint, options.shard_bytes, images.former, **retry)
        settled = Settled.of(folder, **retry)
        shards = pending_shards(plan, settled, images.path_of, images.former)
        start = time.perf_counter()
        work = _Build(folder, fingerprint, processor, images.former | images.path_of, load_tower, options, shards)
        work.run()
        seconds = time.perf_counter() - start
        return report(folder, fingerprint, images, settled.images, work.made, work.stopwatch.seconds(), seconds)
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(disk_full(folder, work.bytes_left() if work else 0, error)) from None


class _Build:
    """One worker's part in making some shards."""

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
        self.made: list[Shard] = []
        """What this worker has made."""
        self._shards = _from(shards, options.worker)
        self._load: Callable[[], Encoder]
        self._load = lambda: Encoder(files, processor, load_tower(), fingerprint.storage, self.stopwatch)
        self._claimed: dict[str, Claim] = {}

    def run(self) -> None:
        """Make shards until there are none left to make.

        Raises:
            DiskFull, Stopped
        """
        worker = Worker.this_process("/".join(map(str, self.options.worker or ())))
        check_room(self.folder, self.bytes_left())
        with StopSignals() as self._stop, Claims(self.folder, worker, self.options.expiry_s) as self._claims:
            self._bar = self._progress()
            with self._bar:
                self._work()
        sweep(self.folder, self.options.expiry_s)

    def bytes_left(self) -> int:
        """Of the shards that are not finished."""
        return self._bytes(self._unfinished())

    def _work(self) -> None:
        encoder: Encoder | None = None
        try:
            while self._unfinished():
                claimed = self._claim()
                first = next(claimed, None)
                if first:
                    encoder = encoder or self._load()
                    self._make(encoder.run(itertools.chain([first], claimed)))
                self._heed_signals()
                if first is None:
                    if not self.options.wait:
                        return
                    time.sleep(min(POLL_S, self.options.expiry_s / 4))
        except RuntimeError:
            time.sleep(SIGNAL_S)
            for name in self._claimed:
                remove_leftovers(self.folder, name)  # torch raises it wherever we are, also where a writer cleans up
            self._heed_signals()  # which the processes that decode were sent too, and ended with an error here
            raise
        finally:
            if encoder:
                encoder.close()

    def _claim(self) -> Iterator[Shard]:
        """The shards that nobody else has, each when it is asked for."""
        for shard in self._unfinished():
            if self._stop.soon:
                return
            if has_receipt(self.folder, shard.name):
                continue
            claim = self._claims.take(shard.name, len(shard.images))
            if claim is None:
                continue
            self._claimed[shard.name] = claim
            if has_receipt(self.folder, shard.name):  # finished between our look and our claim
                self._release(shard)
                continue
            try:
                check_room(self.folder, self._bytes([shard]))
            except DiskFull:
                if len(self._claimed) == 1:
                    raise
                self._release(shard)
                return  # what is in work is finished first
            remove_leftovers(self.folder, shard.name)
            yield shard

    def _make(self, encoded: Iterator[Encoded]) -> None:
        """Write what comes out of the tower, shard by shard."""
        for piece in encoded:
            shard = piece.shard
            with ShardWriter(self.folder, shard.name, self.fingerprint, len(shard.images), self.stopwatch) as writer:
                self._write(writer, _rest_of_shard(piece, encoded))
                with self.stopwatch.phase("flush"):
                    if self._commit(writer, shard):
                        self.made.append(shard)
            self._release(shard)
            self._heed_signals()

    def _commit(self, writer: ShardWriter, shard: Shard) -> bool:
        """Finish a shard; False if another has it or makes it."""
        try:
            return writer.commit()
        except FileNotFoundError:
            if self._claimed[shard.name].is_held():
                raise
            return False  # we were asleep for so long that another took over and cleared our file away

    def _write(self, writer: ShardWriter, pieces: Iterator[Encoded]) -> None:
        unwritten: deque[list[Future[None]]] = deque()
        num_done = 0
        for piece in pieces:
            if self._stop.now:
                self._heed_signals()
            unwritten.append(writer.add(piece.images))
            writer.failed |= piece.failed
            with self.stopwatch.phase("wait for the disk"):
                while len(unwritten) > MAX_UNWRITTEN:
                    for write in unwritten.popleft():
                        write.result()
            num_done += len(piece.images) + len(piece.failed)
            self._claimed[piece.shard.name].update("encoding", num_done)
            self._bar.update(len(piece.images) + len(piece.failed))

    def _release(self, shard: Shard) -> None:
        self._claims.release(self._claimed.pop(shard.name))

    def _unfinished(self) -> list[Shard]:
        finished = set(finished_shards(self.folder))
        return [shard for shard in self._shards if shard.name not in finished]

    def _bytes(self, shards: list[Shard]) -> int:
        return sum(shard.num_tokens for shard in shards) * self.fingerprint.bytes_per_token

    def _heed_signals(self) -> None:
        if self._stop.name and (left := self._unfinished()):
            raise Stopped(
                f"stopped by {self._stop.name} after {count(len(self.made), 'shard')}, {len(left):,} of "
                f"{len(self._shards):,} are left; the same command goes on"
            )

    def _progress(self) -> Any:
        num_images = sum(len(shard.images) for shard in self._unfinished())
        return tqdm(total=num_images, desc="encode images", unit="image", disable=None if num_images else True)


def _rest_of_shard(first: Encoded, others: Iterator[Encoded]) -> Iterator[Encoded]:
    yield first
    while not first.is_last:
        first = next(others)
        yield first


def _from(shards: list[Shard], worker: tuple[int, int] | None) -> list[Shard]:
    """The shards, beginning at a worker's own place."""
    number, total = worker or (0, 1)
    first = number % total * len(shards) // total
    return shards[first:] + shards[:first]
