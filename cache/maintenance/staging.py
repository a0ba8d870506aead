"""Copy a cache to a nearer disk, shard by shard, and check every byte on the way.

Design: a training reads its images in random order, epoch after epoch; from a node's own disk, only the first time
costs network traffic. Each shard is read once and its checksums are compared during the copy. It gets its receipt only
when it is complete on the target disk, so an interrupted staging can be resumed, and a staged cache opens like any
other. Several processes on a node share the work by claims, as builds do. The source is only read, so it may be on a
read-only disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lookonce.cache.format import BUILD_COMMAND, REPAIR_COMMAND
from lookonce.cache.maintenance.verify import Problem, Reading, check_shard
from lookonce.cache.store.claims import Claim, Claims, using
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    MANIFEST,
    QUARANTINE,
    check_fingerprint,
    plan_path,
    read_manifest,
    read_receipt,
    receipt_path,
)
from lookonce.cache.store.reader import Index, VisionCache, write_index
from lookonce.cache.store.shards import remove_leftovers, shard_path, write_all
from lookonce.claim_file import Process
from lookonce.disk_space import check_room, disk_full
from lookonce.errors import CacheError
from lookonce.files import create_text, flush, is_full, temporary_name, write_text
from lookonce.text import Notify, count, duration, first_line, quiet, size

POLL_S = 1.0
"""How often a process that waits for others checks their progress."""
NUM_NAMED = 20
"""How many problems the text of a report shows."""


@dataclass(frozen=True)
class StagingReport:
    """What was copied, and what is staged now."""

    source: Path
    folder: Path
    num_shards: int
    """Number of shards to stage."""
    num_copied: int
    num_reused: int
    """Number of shards that were staged before."""
    num_by_others: int
    """Number of shards that other processes copied meanwhile."""
    copied_bytes: int
    seconds: float
    problems: list[Problem]
    """Damage in the source; those shards are not staged."""

    def text(self) -> str:
        rate = f"{duration(self.seconds)}, {size(self.copied_bytes / max(self.seconds, 1e-3))}/s"
        copied = f"copied {count(self.num_copied, 'shard')} ({size(self.copied_bytes)}) in {rate}"
        parts = [copied if self.num_copied else "nothing copied"]
        parts += [f"{self.num_by_others:,} by other processes"] if self.num_by_others else []
        parts += [f"{self.num_reused:,} staged before"] if self.num_reused else []
        lines = [f"staged {self.source} in {self.folder}: {', '.join(parts)}"]
        lines += [f"  {problem.text()}" for problem in self.problems[:NUM_NAMED]]
        if self.problems:
            lines.append(f"{count(len(self.problems), 'problem')} in the source; repair it with: {REPAIR_COMMAND}")
        return "\n".join(lines)


def stage(source: Path, target_root: Path, keys: Iterable[str] | None = None, *, verify: bool = False) -> StagingReport:
    """Copy the cache `source` into `target_root`; with `keys`, only the shards that hold these images.

    Safe to interrupt, to run again, and to run several times at once. `verify` reads shards that are already staged
    and copies damaged ones again.

    Raises:
        CacheError: the source is not a cache, has nothing to stage, or has a broken receipt; or a repair or a garbage
            collection is changing one of the folders.
        CacheMismatch: the target has another cache of the same name.
        DiskFull: there is no room.
    """
    fingerprint = read_manifest(source)
    folder = target_root / fingerprint.folder_name
    if folder.exists() and folder.samefile(source):
        raise CacheError(f"{source} is already in {target_root}; name another folder to stage to")
    staging = _Staging(source, folder, fingerprint, _sizes(source, fingerprint, keys), verify)
    try:
        check_room(folder, staging.bytes_left())
        with using(source, "lookonce cache stage"), using(folder, "lookonce cache stage"):
            copy_small_files(source, folder, fingerprint)
            report = staging.run()
            write_index(folder, fingerprint.sha256)
            return report
    except OSError as error:
        if not is_full(error):
            raise
        raise disk_full(folder, staging.bytes_left(), error) from None


def find_staged(
    stage_root: Path, fingerprint: Fingerprint, keys: Iterable[str], *, notify: Notify = quiet
) -> VisionCache | None:
    """The staged cache of this fingerprint below a folder, if it opens and has all these images; notes why not."""
    folder = stage_root / fingerprint.folder_name
    if not folder.exists():
        return None
    try:
        cache = VisionCache.open(folder)
    except (CacheError, OSError) as error:
        notify(f"the staged cache {folder} is not used: {first_line(error)}")
        return None
    return cache if cache.fingerprint == fingerprint and all(key in cache for key in keys) else None


def _sizes(source: Path, fingerprint: Fingerprint, keys: Iterable[str] | None) -> dict[str, int]:
    """The size of each shard to copy."""
    index = Index.open(source, fingerprint.sha256)
    sizes = dict(zip(index.shards, index.columns["shard_bytes"].tolist(), strict=True))
    if not sizes:
        raise CacheError(
            f"{source} has no finished shard, so there is nothing to stage; build some with: {BUILD_COMMAND}"
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
        CacheMismatch: the folder holds another cache.
    """
    if not create_text(folder / MANIFEST, (source / MANIFEST).read_text()):
        check_fingerprint(folder, read_manifest(folder), fingerprint)
    number = 0
    while (path := plan_path(source, number)).exists():
        create_text(plan_path(folder, number), path.read_text())
        number += 1
    if (source / QUARANTINE).exists():
        write_text(folder / QUARANTINE, (source / QUARANTINE).read_text())


class _Staging:
    """One process's share in a staging."""

    def __init__(
        self, source: Path, folder: Path, fingerprint: Fingerprint, sizes: dict[str, int], verify: bool
    ) -> None:
        self._source, self._folder, self._fingerprint = source, folder, fingerprint
        self._sizes, self._verify = sizes, verify
        self._problems: list[Problem] = []
        self._copied: list[str] = []

    def run(self) -> StagingReport:
        start = time.perf_counter()
        self._reading = Reading("stage", None)
        with Claims(self._folder, Process.this("stage")) as self._claims, self._reading.bar as bar:
            staged = self._reading.map(self._is_intact, self._sizes)
            todo = [name for name, is_staged in zip(self._sizes, staged, strict=True) if not is_staged]
            num_todo = len(todo)
            bar.reset(total=sum(self._sizes[name] for name in todo))
            while todo:  # until each is staged or known to be damaged; other processes may be copying some
                done = list(self._reading.map(self._copy_unclaimed, todo))
                if not any(done):
                    time.sleep(POLL_S)
                todo = [name for name, is_done in zip(todo, done, strict=True) if not is_done]
        num_broken = len({problem.shard for problem in self._problems})
        return StagingReport(
            source=self._source,
            folder=self._folder,
            num_shards=len(self._sizes),
            num_copied=len(self._copied),
            num_reused=len(self._sizes) - num_todo,
            num_by_others=num_todo - len(self._copied) - num_broken,
            copied_bytes=sum(self._sizes[name] for name in self._copied),
            seconds=round(time.perf_counter() - start, 3),
            problems=self._problems,
        )

    def bytes_left(self) -> int:
        return sum(num_bytes for name, num_bytes in self._sizes.items() if not self._is_staged(name))

    def _is_staged(self, name: str) -> bool:
        """Whether a shard is staged: the target has the same receipt, and a file of the right size."""
        try:
            mine, theirs = (receipt_path(folder, name).read_bytes() for folder in (self._folder, self._source))
            return mine == theirs and shard_path(self._folder, name).stat().st_size == self._sizes[name]
        except FileNotFoundError:
            return False

    def _is_intact(self, name: str) -> bool:
        """Whether a shard is staged and, with `verify`, has the right checksums."""
        if not self._verify or not self._is_staged(name):
            return self._is_staged(name)
        receipt = read_receipt(self._folder, name)
        count_block = self._reading.count
        if list(check_shard(self._folder, receipt, self._fingerprint, every_byte=True, on_block=count_block)):
            receipt_path(self._folder, name).unlink()  # without it the shard is not used while it is copied again
            return False
        return True

    def _copy_unclaimed(self, name: str) -> bool:
        """Copy a shard unless another process is copying it; False if one is."""
        claim = self._claims.take(name, 0)
        if claim is None:
            return False
        try:
            if not self._is_staged(name):
                remove_leftovers(self._folder, name)
                self._copy(name, claim)
            return True
        finally:
            self._claims.release(claim)

    def _copy(self, name: str, claim: Claim) -> None:
        """Copy a shard to a temporary file, and rename that if the source has no problems."""
        path = shard_path(self._folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        receipt = read_receipt(self._source, name)
        try:
            with temporary.open("xb", buffering=0) as file:

                def write_block(block: memoryview, offset: int) -> None:
                    self._reading.count(block)
                    write_all(file.fileno(), block, offset)
                    claim.update("copying", 0)

                found = check_shard(self._source, receipt, self._fingerprint, every_byte=True, on_block=write_block)
                problems = list(found)
                os.fsync(file.fileno())
            if problems:
                self._problems.extend(problems)
                return
            os.replace(temporary, path)
            flush(path.parent)
            write_text(receipt_path(self._folder, name), receipt_path(self._source, name).read_text())
            self._copied.append(name)
        finally:
            temporary.unlink(missing_ok=True)
