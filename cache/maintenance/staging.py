"""Copy a cache to a disk nearer by, shard by shard, every byte checked on the way.

Design: a training reads its images in random order, epoch after epoch; from a node's own disk that costs the network
nothing after the first time. Each shard is read once, its checksums are compared as it goes by, and it gets its receipt
here only when it is whole on this disk, so an interrupted staging goes on where it stopped, and what is staged opens
like any other cache. Several processes on a node share the work by claims, as builders do. The source is only ever
read: it may be on a disk where nobody may write.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from lookonce.cache.constants import BUILD_COMMAND, REPAIR_COMMAND
from lookonce.cache.maintenance.checks import NUM_THREADS, Problem, check_shard
from lookonce.cache.store.claims import Claim, Claims, Worker
from lookonce.cache.store.direct_io import write_all
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.index import Index, write_index
from lookonce.cache.store.manifest import MANIFEST, QUARANTINE, mismatch, plan_path, read_manifest
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.receipts import Receipt, read_receipt, receipt_path
from lookonce.cache.store.shards import remove_leftovers, shard_path
from lookonce.disk_space import check_room, disk_full
from lookonce.errors import CacheError, CacheMismatch, DiskFull
from lookonce.files import create_text, flush, follow_umask, is_full, temporary_name, write_text
from lookonce.text import count, duration, size

POLL_S = 1.0
"""How often one who waits for other processes looks."""
NUM_NAMED = 20


@dataclass(frozen=True)
class StageReport:
    """What was copied, and what is there now."""

    source: Path
    folder: Path
    num_shards: int
    """That were asked for."""
    num_copied: int
    num_reused: int
    """There before."""
    num_by_others: int
    """Copied by other processes in the same time."""
    copied_bytes: int
    seconds: float
    problems: list[Problem]
    """Damage in the source; those shards are not staged."""

    def text(self) -> str:
        rate = f"{duration(self.seconds)}, {size(self.copied_bytes / max(self.seconds, 1e-3))}/s"
        copied = f"copied {count(self.num_copied, 'shard')} ({size(self.copied_bytes)}) in {rate}"
        parts = [copied if self.num_copied else "nothing copied"]
        parts += [f"{self.num_by_others:,} by other processes"] if self.num_by_others else []
        parts += [f"{self.num_reused:,} there before"] if self.num_reused else []
        lines = [f"staged {self.source} in {self.folder}: {', '.join(parts)}"]
        lines += [f"  {problem.text()}" for problem in self.problems[:NUM_NAMED]]
        if self.problems:
            lines.append(f"{count(len(self.problems), 'problem')} in the source; mend it with: {REPAIR_COMMAND}")
        return "\n".join(lines)


def stage(source: Path, target_root: Path, keys: Iterable[str] | None = None, *, verify: bool = False) -> StageReport:
    """Copy the cache `source` below `target_root`; with `keys` only the shards that hold these images.

    Safe to interrupt, to run again, and to run as often as one likes at the same time. `verify` reads what is there
    already once more and copies again what is damaged.

    Raises:
        CacheError: the source is no cache, has nothing to stage, or one of its receipts is broken.
        CacheMismatch: the target holds something else under the same name.
        DiskFull: there is no room.
    """
    fingerprint = read_manifest(source)
    folder = target_root / fingerprint.folder_name
    if folder.exists() and folder.samefile(source):
        raise CacheError(f"{source} is in {target_root} already; name another folder to stage to")
    work = _Staging(source, folder, _sizes(source, fingerprint, keys), verify)
    try:
        check_room(folder, work.bytes_left())
        copy_small_files(source, folder, fingerprint)
        report = work.run()
        write_index(folder, fingerprint.sha256)
        return report
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(disk_full(folder, work.bytes_left(), error)) from None


def find_staged(
    stage_root: Path, fingerprint: Fingerprint, keys: Iterable[str], *, check: bool = True
) -> VisionCache | None:
    """The cache of this fingerprint that is staged below a folder, if it holds all these images and is sound."""
    folder = stage_root / fingerprint.folder_name
    try:
        cache = VisionCache.open(folder, check=check)
    except (CacheError, OSError):
        return None
    return cache if cache.fingerprint == fingerprint and all(key in cache for key in keys) else None


def _sizes(source: Path, fingerprint: Fingerprint, keys: Iterable[str] | None) -> dict[str, int]:
    """The shards to copy, at least one, and their bytes."""
    index = Index.open(source, fingerprint.sha256)
    sizes = dict(zip(index.shards, index.columns["shard_bytes"].tolist(), strict=True))
    if not sizes:
        raise CacheError(
            f"{source} has no finished shard, so there is nothing to stage; make some with: {BUILD_COMMAND}"
        )
    if keys is None:
        return sizes
    rows = {index.find(key) for key in keys}
    wanted = {index.entry(row)[0] for row in rows if row is not None}
    if not wanted:
        raise CacheError(
            f"{source} has none of the images asked for, so there is nothing to stage; add them with: {BUILD_COMMAND}"
        )
    return {name: num_bytes for name, num_bytes in sizes.items() if name in wanted}


def copy_small_files(source: Path, folder: Path, fingerprint: Fingerprint) -> None:
    """Copy manifest, plan and quarantine, the manifest first.

    Raises:
        CacheMismatch: another cache is there.
    """
    if not create_text(folder / MANIFEST, (source / MANIFEST).read_text()):
        found = read_manifest(folder)
        if found != fingerprint:
            raise CacheMismatch(mismatch([found], fingerprint, f"{folder} was made from something else"))
    part = 0
    while (path := plan_path(source, part)).exists():
        create_text(plan_path(folder, part), path.read_text())
        part += 1
    if (source / QUARANTINE).exists():
        write_text(folder / QUARANTINE, (source / QUARANTINE).read_text())


class _Staging:
    """A staging under way, by this process."""

    def __init__(self, source: Path, folder: Path, sizes: dict[str, int], verify: bool) -> None:
        self._source, self._folder, self._sizes, self._verify = source, folder, sizes, verify
        self._problems: list[Problem] = []
        self._copied: list[str] = []
        self._lock = threading.Lock()
        self._ended = False

    def run(self) -> StageReport:
        start = time.perf_counter()
        sound = self._on_threads(self._is_sound, self._sizes)
        todo = [name for name, is_sound in zip(self._sizes, sound, strict=True) if not is_sound]
        total = sum(self._sizes[name] for name in todo)
        self._bar = tqdm(total=total, desc="stage", unit="B", unit_scale=True, leave=False, disable=None)
        with Claims(self._folder, Worker.this_process("stage")) as self._claims, self._bar:
            self._copy_all(todo)
        num_broken = len({problem.shard for problem in self._problems})
        return StageReport(
            source=self._source,
            folder=self._folder,
            num_shards=len(self._sizes),
            num_copied=len(self._copied),
            num_reused=len(self._sizes) - len(todo),
            num_by_others=len(todo) - len(self._copied) - num_broken,
            copied_bytes=sum(self._sizes[name] for name in self._copied),
            seconds=round(time.perf_counter() - start, 3),
            problems=self._problems,
        )

    def bytes_left(self) -> int:
        return sum(num_bytes for name, num_bytes in self._sizes.items() if not self._is_there(name))

    def _is_there(self, name: str) -> bool:
        """Whether a shard is staged: the same receipt, and a file of its size."""
        try:
            here, there = (receipt_path(folder, name).read_bytes() for folder in (self._folder, self._source))
            return here == there and shard_path(self._folder, name).stat().st_size == self._sizes[name]
        except FileNotFoundError:
            return False

    def _is_sound(self, name: str) -> bool:
        """Whether a shard is staged, and whole if that is to be looked at too."""
        if not self._verify or not self._is_there(name):
            return self._is_there(name)
        receipt = read_receipt(self._folder, name)
        if check_shard(self._folder, receipt, None, every_byte=True, take=self._heed_end):
            receipt_path(self._folder, name).unlink()  # it must not pass for whole while it is copied again
            return False
        return True

    def _copy_all(self, todo: list[str]) -> None:
        """Copy shards until each is settled: here, or known to be damaged. Waits for those that others copy."""
        while todo:
            settled = self._on_threads(self._try, todo)
            if not any(settled):
                time.sleep(POLL_S)
            todo = [name for name, is_settled in zip(todo, settled, strict=True) if not is_settled]

    def _on_threads(self, function: Callable[[str], bool], names: Iterable[str]) -> list[bool]:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            try:
                return list(threads.map(function, names))
            except BaseException:
                self._ended = True  # else Ctrl-C would wait until the shards in hand are copied
                raise

    def _heed_end(self, piece: memoryview, offset: int) -> None:
        if self._ended:
            raise InterruptedError

    def _try(self, name: str) -> bool:
        """Copy a shard unless someone else does; whether it is settled."""
        claim = self._claims.take(name, 0)
        if claim is None:
            return False
        try:
            if not self._is_there(name):
                remove_leftovers(self._folder, name)
                self._copy(name, claim)
            return True
        finally:
            self._claims.release(claim)

    def _copy(self, name: str, claim: Claim) -> None:
        path = shard_path(self._folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        receipt = read_receipt(self._source, name)
        try:
            problems = self._copy_checked(receipt, temporary, claim)
            if not problems:
                os.replace(temporary, path)
                flush(path.parent)
                write_text(receipt_path(self._folder, name), receipt_path(self._source, name).read_text())
        finally:
            temporary.unlink(missing_ok=True)
        with self._lock:
            self._problems += problems
            self._copied += [] if problems else [name]

    def _copy_checked(self, receipt: Receipt, temporary: Path, claim: Claim) -> list[Problem]:
        """Copy a shard to a temporary file, flushed; gives what is wrong with what was read."""
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:

            def take(piece: memoryview, offset: int) -> None:
                self._heed_end(piece, offset)
                write_all(descriptor, piece, offset)
                claim.update("copying", 0)
                with self._lock:
                    self._bar.update(len(piece))

            problems = check_shard(self._source, receipt, None, every_byte=True, take=take)
            follow_umask(temporary)
            os.fsync(descriptor)
            return problems
        finally:
            os.close(descriptor)
