"""What a build has to do and has done: which images are stored, planned, missing or unusable; progress of workers.

Design: several workers may find at once that the plan lacks images. Each makes the same extension from the same plan;
the first to write its file wins, the others read the plan again. A worker does not hash files that the plan names (a
hundred workers would read the whole dataset a hundred times): the plan has their keys, and the bytes are compared with
the key when the image is encoded. A file whose stamp has changed since it was planned is hashed again.

Progress (`lookonce status`) is read from receipts and claims; no process is asked. The rate counts the shards that all
workers finished in the last hour, and is 0 if no worker is alive. A worker is slow if it has had its shard for `SLOW`
times as long as a shard with that number of images takes, by the median of the finished shards.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lookonce.cache.store.claims import Work, claimed_work
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import Plan, PlannedImage, Receipt, Shard, extend_plan, read_plan, read_receipts
from lookonce.claim_file import EXPIRY_S
from lookonce.datasets.images import ImageIndex, Stamp, is_gone, stamps
from lookonce.text import duration, table

if TYPE_CHECKING:
    from lookonce.cache.model.pixels import ImageProcessor
WINDOW_S = 3600
"""The rate counts shards that were finished within this time."""
SLOW = 3
SLOW_S = 60
"""No worker is reported as slow sooner: its first shard waits for the tower to load."""


def planned_images(index: ImageIndex, processor: ImageProcessor) -> list[PlannedImage]:
    """The distinct images of an index, in reading order."""
    files: dict[str, dict[str, Stamp | None]] = defaultdict(dict)
    for path, key in sorted(index.key_of.items()):
        files[key][str(path)] = index.stamp_of.get(path)
    return [
        PlannedImage(
            key,
            planned_tokens(processor, index.size_of.get(key)),
            tuple(files[key]),
            tuple(files[key].values()),
            key in index.transparent,
            index.variants.get(key),
        )
        for key in index.path_of
    ]


def planned_tokens(processor: ImageProcessor, size: tuple[int, int] | None) -> int:
    """The tokens of an image by its header; 0 if it has none or an impossible shape, which encoding will report."""
    try:
        return processor.num_tokens(*size) if size else 0
    except ValueError:
        return 0


@dataclass(frozen=True)
class Finished:
    """What is finished in a cache, by its receipts at one moment; other workers may be adding to it."""

    images: set[str]
    """Keys of stored images and of those that failed, except for failures that are to be retried."""
    shards: set[str]
    """Names of the shards with a receipt."""

    @classmethod
    def of(cls, receipts: Iterable[Receipt], *, retry_unread: bool = True, retry_quarantined: bool = False) -> Finished:
        """What these receipts, all of a cache, say; which failures are retried is decided by the arguments."""
        images: set[str] = set()
        shards: set[str] = set()
        for receipt in receipts:
            shards.add(receipt.shard)
            images |= receipt.images.keys()
            for key, failure in receipt.failed.items():
                if not (retry_unread if failure.retry else retry_quarantined):
                    images.add(key)
        return cls(images, shards)


def new_shards(
    plan: Plan,
    finished: Finished,
    images: Iterable[PlannedImage],
    fingerprint: Fingerprint,
    shard_bytes: int,
    former: Collection[str] = (),
) -> tuple[Shard, ...]:
    """Shards to add to a plan for those of `images` that are neither finished nor in a pending shard.

    `former` are the keys that changed files had when they were planned. Images with a transparent colour that version
    0.2 has planned are planned again: it encoded the colour as it is in the file.
    """
    image_of = {image.key: image for image in images}
    pending = {key for shard in pending_shards(plan, finished, image_of.keys(), former) for key in shard.keys}
    tokens_of = {image.key: image.num_tokens for image in plan.images if image.num_tokens}  # `index_from_plan` has none
    painted = {image.key for image in plan.images if image.is_transparent}
    new = [
        replace(image, num_tokens=image.num_tokens or tokens_of.get(image.variant.of if image.variant else key, 0))
        for key, image in image_of.items()
        if (image.is_transparent and key not in painted) or not (key in finished.images or key in pending)
    ]
    return plan.extension(new, fingerprint.bytes_per_token, shard_bytes, taken=finished.shards)


def ensure_plan(
    folder: Path,
    images: Iterable[PlannedImage],
    fingerprint: Fingerprint,
    shard_bytes: int,
    former: Collection[str] = (),
    **retry: bool,
) -> Plan:
    """The plan of a cache, first extended on disk so that it covers these images; `retry` as in `Finished.of`."""
    images = list(images)
    while True:
        plan = read_plan(folder)
        new = new_shards(plan, Finished.of(read_receipts(folder), **retry), images, fingerprint, shard_bytes, former)
        relocated = found_again(plan, new, images)
        if not new and not relocated:
            return plan
        extend_plan(folder, plan, new, relocated)


def found_again(plan: Plan, new: Iterable[Shard], images: Iterable[PlannedImage]) -> list[PlannedImage]:
    """Those of `images` with files, or stamps of files, that neither `plan` nor its `new` shards have.

    A stamp that is not known yet is no news about a file.
    """
    known = plan.extended(tuple(new)).files()
    relocated = []
    for image in images:
        news = []
        for file, stamp in itertools.zip_longest(image.files, image.stamps):
            key, recorded = known.get(file, ("", None))
            if key != image.key or stamp not in (None, recorded):
                news.append((file, stamp))
        if news:
            files, stamps = zip(*news, strict=True)
            relocated.append(replace(image, files=files, stamps=stamps))
    return relocated


def pending_shards(plan: Plan, finished: Finished, keys: Collection[str], former: Collection[str] = ()) -> list[Shard]:
    """The shards to build: unfinished, all their images among `keys` or `former`, and some of `keys` not stored yet.

    Images of `former`, whose files have changed, will be missing in the shard; where they are most, it is not built.
    """
    keys = set(keys)
    known = keys.union(former)

    def is_pending(shard: Shard) -> bool:
        needed = keys.intersection(shard.keys)
        transparent = {image.key for image in shard.images if image.is_transparent}  # an older shard may have them too
        return 2 * len(needed) >= len(shard.keys) and not needed <= finished.images - transparent

    return [
        shard
        for shard in plan.shards
        if shard.name not in finished.shards and known.issuperset(shard.keys) and is_pending(shard)
    ]


def index_from_plan(plan: Plan, paths: Iterable[Path], *, without_files: bool = False) -> ImageIndex:
    """The image keys of files by the plan, without reading the files.

    Files that the plan lacks, or that may have changed since, are left out; `former` has the planned keys of these.
    `without_files`: a file that does not exist any more has its planned key, since training needs features only.
    """
    planned = plan.files()
    current_stamps = stamps(path for path in paths if str(path) in planned)
    stamp_of = {path: stamp for path, stamp in current_stamps.items() if stamp and stamp == planned[str(path)][1]}
    gone = (
        {path for path, stamp in current_stamps.items() if stamp is None and is_gone(path)} if without_files else set()
    )
    key_of = {path: planned[str(path)][0] for path in current_stamps if path in stamp_of or path in gone}
    path_of = {key: path for path, key in reversed(key_of.items())}
    former = {planned[str(path)][0]: path for path in current_stamps if path not in key_of}
    return ImageIndex(
        key_of,
        {image.key: path_of[image.key] for image in plan.images if image.key in path_of},
        stamp_of=stamp_of,
        former={key: path for key, path in former.items() if key not in path_of},
    )


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

    def pace(self) -> str:
        """The rate and the time left; empty without a rate."""
        return "" if self.eta_s is None else f"{self.images_per_second:.1f} images/s, done in {duration(self.eta_s)}"


def workers_table(workers: list[WorkerStatus]) -> str:
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


def status(folder: Path, keys: Iterable[str], receipts: Sequence[Receipt], expiry_s: float = EXPIRY_S) -> StatusReport:
    """How many of the images `keys` the cache in `folder`, which has these receipts, holds; it need not exist.

    `expiry_s` must be that of the builds.
    """
    image_keys = set(keys)
    done = {key for receipt in receipts for key in receipt.images} & image_keys
    failed = {key for receipt in receipts for key in receipt.failed} & image_keys
    seconds = [receipt.seconds / len(receipt.images) for receipt in receipts if receipt.images]
    usual_s = statistics.median(seconds) if seconds else float("inf")
    workers = [_worker_status(*claim, usual_s) for claim in claimed_work(folder, expiry_s)]
    now, rate, missing = time.time(), 0.0, len(image_keys) - len(done) - len(failed - done)
    recent = [receipt for receipt in receipts if receipt.finished > now - WINDOW_S]
    if recent and any(worker.alive for worker in workers):
        begin = min(receipt.finished - receipt.seconds for receipt in recent)
        rate = sum(len(receipt.images) for receipt in recent) / max(now - begin, 1e-3)
    return StatusReport(
        folder=folder,
        num_images=len(image_keys),
        num_done=len(done),
        num_quarantined=len(failed - done),
        num_shards=len(receipts),
        num_bytes=sum(receipt.size_bytes for receipt in receipts),
        encode_seconds=sum(receipt.seconds for receipt in receipts),
        images_per_second=rate,
        eta_s=missing / rate if rate and missing else None,
        workers=workers,
    )


def _worker_status(work: Work, silent_s: float, alive: bool, usual_s: float) -> WorkerStatus:
    """`usual_s` are the seconds of one image in the median shard."""
    age_s = max(time.time() - work.started, 0.0) if work.started else 0.0
    return WorkerStatus(
        worker=work.worker.name,
        host=work.worker.host,
        job=work.worker.job,
        shard=work.shard,
        phase=work.phase,
        num_done=work.num_done,
        num_images=work.num_images,
        age_s=round(age_s, 1),
        silent_s=round(max(silent_s, 0.0), 1),
        alive=alive,
        slow=age_s > max(SLOW * usual_s * work.num_images, SLOW_S),
    )
