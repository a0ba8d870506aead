"""Progress of a cache, also while workers run: the report behind `cache status`.

Everything is read from receipts and claims; no process is asked. The rate counts the shards that all workers finished
in the last hour, and is 0 if no worker is alive. A worker is slow if it has had its shard for `SLOW` times as long as
a shard with that number of images takes, by the median of the finished shards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lookonce.cache.store.claims import Work, claimed_work
from lookonce.cache.store.manifest import MANIFEST
from lookonce.cache.store.receipts import Receipt, read_receipts
from lookonce.claim_file import EXPIRY_S
from lookonce.text import duration, rows, size, table

WINDOW_S = 3600
"""The rate counts shards that were finished within this time."""
SLOW = 3
SLOW_S = 60
"""No worker is reported as slow sooner: its first shard waits for the tower to load."""


@dataclass(frozen=True)
class WorkerStatus:
    """A worker and its current shard."""

    worker: str
    host: str
    job: str
    shard: str
    phase: str
    num_done: int
    num_images: int
    age_s: float
    """Seconds since it claimed the shard."""
    silent_s: float
    """Seconds since its last heartbeat."""
    alive: bool
    slow: bool = False

    @property
    def state(self) -> str:
        """`dead` or `slow`; empty if the worker is fine."""
        return "dead" if not self.alive else "slow" if self.slow else ""


@dataclass(frozen=True)
class StatusReport:
    """How many of the wanted images are stored, and which workers are encoding."""

    folder: Path
    num_images: int
    num_done: int
    num_quarantined: int
    num_shards: int
    num_bytes: int
    encode_seconds: float
    images_per_second: float
    """Recent rate of all workers together; 0 if no shard was finished."""
    eta_s: float | None
    """Seconds until everything is encoded at this rate; None without a rate."""
    workers: list[WorkerStatus]

    @property
    def num_missing(self) -> int:
        return self.num_images - self.num_done - self.num_quarantined

    def text(self) -> str:
        complete = "complete but for those in quarantine" if self.num_quarantined else "complete"
        state = complete if self.num_missing == 0 else f"{self.num_missing:,} still to encode"
        lines = [
            ("images", f"{self.num_done:,} of {self.num_images:,} encoded, {state}"),
            ("quarantined", f"{self.num_quarantined:,}"),
            ("shards", f"{self.num_shards:,}, {size(self.num_bytes)}, encoded in {duration(self.encode_seconds)}"),
            *self._progress(),
            ("folder", str(self.folder)),
        ]
        return "\n\n".join([rows(lines), *([workers_table(self.workers)] if self.workers else [])])

    def _progress(self) -> list[tuple[str, str]]:
        if self.eta_s is None:
            return []
        return [("rate", f"{self.images_per_second:.1f} images/s, done in {duration(self.eta_s)}")]


def workers_table(workers: list[WorkerStatus]) -> str:
    """A table of workers, one a line."""
    lines = [
        (
            f"{work.worker} ({work.state})" if work.state else work.worker,
            work.job or work.host,
            work.shard,
            f"{work.phase} {work.num_done}/{work.num_images}",
            duration(work.age_s),
            f"{duration(work.silent_s)} ago",
        )
        for work in workers
    ]
    return table(("worker", "where", "shard", "phase", "for", "heartbeat"), lines)


def status(
    folder: Path, keys: Iterable[str], expiry_s: float = EXPIRY_S, receipts: list[Receipt] | None = None
) -> StatusReport:
    """How many of the images `keys` the cache in `folder` holds; it need not exist.

    `receipts` are the cache's, if they are already read. `expiry_s` must be that of the builds.

    Raises:
        CacheCorrupt: a receipt is damaged.
    """
    wanted = set(keys)
    if receipts is None:
        receipts = list(read_receipts(folder)) if (folder / MANIFEST).exists() else []
    done = {key for receipt in receipts for key in receipt.images} & wanted
    failed = {key for receipt in receipts for key in receipt.failed} & wanted
    usual_s = _usual_seconds(receipts)
    workers = [_worker_status(*claim, usual_s) for claim in claimed_work(folder, expiry_s)]
    rate = _rate(receipts, workers)
    missing = len(wanted) - len(done) - len(failed - done)
    return StatusReport(
        folder=folder,
        num_images=len(wanted),
        num_done=len(done),
        num_quarantined=len(failed - done),
        num_shards=len(receipts),
        num_bytes=sum(receipt.size_bytes for receipt in receipts),
        encode_seconds=sum(receipt.seconds for receipt in receipts),
        images_per_second=rate,
        eta_s=missing / rate if rate and missing else None,
        workers=workers,
    )


def _usual_seconds(receipts: list[Receipt]) -> float | None:
    """Seconds for one image in the median shard; None if no shard is finished."""
    each = [receipt.seconds / len(receipt.images) for receipt in receipts if receipt.images]
    return statistics.median(each) if each else None


def _worker_status(work: Work, silent_s: float, alive: bool, usual_s: float | None) -> WorkerStatus:
    worker = work.worker
    age_s = max(time.time() - work.started, 0.0) if work.started else 0.0
    return WorkerStatus(
        worker.name,
        worker.host,
        worker.job,
        work.shard,
        work.phase,
        work.num_done,
        work.num_images,
        round(age_s, 1),
        round(max(silent_s, 0.0), 1),
        alive,
        usual_s is not None and age_s > max(SLOW * usual_s * work.num_images, SLOW_S),
    )


def _rate(receipts: list[Receipt], workers: list[WorkerStatus]) -> float:
    """Images a second in recently finished shards; 0 if no worker is alive."""
    alive = [worker.age_s for worker in workers if worker.alive]
    if not alive:
        return 0.0
    now = time.time()
    recent = [receipt for receipt in receipts if receipt.finished > now - WINDOW_S]
    if not recent:
        return 0.0
    begin = min(receipt.finished - receipt.seconds for receipt in recent)
    return sum(len(receipt.images) for receipt in recent) / max(now - begin, 1e-3)
