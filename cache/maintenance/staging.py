"""Copy a cache to a nearer disk, shard by shard, and check every byte on the way.

Design: each shard is read once and its checksums are compared during the copy. It gets its receipt only when it is
complete on the target disk, so an interrupted staging can be resumed, and a staged cache opens like any other. One
process of a node copies; a second one into the same folder is refused. The source may be on a read-only disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lookonce.cache.format import BUILD_COMMAND, REPAIR_COMMAND
from lookonce.cache.maintenance.verify import NUM_NAMED, OnBlock, Problem, Reading, check_shard, verify_shard
from lookonce.cache.store.claims import sweep, using
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    MANIFEST,
    QUARANTINE,
    check_fingerprint,
    plan_files,
    read_manifest,
    read_receipt,
    receipt_path,
)
from lookonce.cache.store.reader import Index, VisionCache, write_index
from lookonce.cache.store.shards import shard_path, write_all
from lookonce.disk_space import check_room, disk_full
from lookonce.errors import CacheError
from lookonce.files import atomic_write, create_text, is_full, write_text
from lookonce.text import Notify, count, duration, first_line, quiet, size

COMMAND = "lookonce cache stage"


@dataclass(frozen=True)
class StagingReport:
    """What was copied, and what is staged now."""

    source: Path
    folder: Path
    num_shards: int
    num_copied: int
    num_reused: int
    """Number of shards that were staged before."""
    copied_bytes: int
    seconds: float
    problems: list[Problem]
    """Damage in the source; those shards are not staged."""

    def text(self) -> str:
        rate = f"{duration(self.seconds)}, {size(self.copied_bytes / max(self.seconds, 1e-3))}/s"
        copied = f"copied {count(self.num_copied, 'shard')} ({size(self.copied_bytes)}) in {rate}"
        parts = [copied if self.num_copied else "nothing copied"]
        parts += [f"{count(self.num_reused, 'shard')} staged before"] if self.num_reused else []
        lines = [f"staged {self.source} in {self.folder}: {', '.join(parts)}"]
        lines += [f"  {problem.text()}" for problem in self.problems[:NUM_NAMED]]
        if self.problems:
            lines.append(f"{count(len(self.problems), 'problem')} in the source; repair it with: {REPAIR_COMMAND}")
        return "\n".join(lines)


def stage(source: Path, target_root: Path, keys: Iterable[str] | None = None, *, verify: bool = False) -> StagingReport:
    """Copy the cache `source` into `target_root`; with `keys`, only the shards that hold these images.

    Safe to interrupt and to run again. `verify` reads shards that are already staged and copies damaged ones again.

    Raises:
        CacheError: the source is not a cache, has nothing to stage, or has a broken receipt; or another process stages
            into the same folder, or a repair or a garbage collection is changing one of the folders.
        CacheMismatch: the target has another cache of the same name.
        DiskFull: there is no room.
    """
    start = time.perf_counter()
    fingerprint = read_manifest(source)
    folder = target_root / fingerprint.folder_name
    if folder.exists() and folder.samefile(source):
        raise CacheError(f"{source} is already in {target_root}; name another folder to stage to")
    sizes = shards_with(source, fingerprint, keys)

    def missing() -> dict[str, int]:
        return {name: num_bytes for name, num_bytes in sizes.items() if not is_staged(source, folder, name, num_bytes)}

    try:
        check_room(folder, sum(missing().values()))
        with using(source, COMMAND), using(folder, COMMAND, name="stage"):
            sweep(folder)
            copy_small_files(source, folder, fingerprint)
            reading = Reading("stage", None)
            with reading.bar:
                if verify:
                    staged = sizes.keys() - missing().keys()
                    for shard_problems in reading.map(
                        lambda name: verify_shard(folder, name, fingerprint, "full", reading.count)[1], staged
                    ):
                        for problem in shard_problems:
                            receipt_path(folder, problem.shard).unlink(missing_ok=True)
                todo = missing()
                reading.bar.reset(total=sum(todo.values()))
                copies = reading.map(lambda name: copy_shard(source, folder, name, fingerprint, reading.count), todo)
                problems = [problem for shard_problems in copies for problem in shard_problems]
            write_index(folder, fingerprint.sha256)
    except OSError as error:
        if not is_full(error):
            raise
        raise disk_full(folder, sum(missing().values()), error) from None
    copied = todo.keys() - {problem.shard for problem in problems}
    return StagingReport(
        source=source,
        folder=folder,
        num_shards=len(sizes),
        num_copied=len(copied),
        num_reused=len(sizes) - len(todo),
        copied_bytes=sum(sizes[name] for name in copied),
        seconds=round(time.perf_counter() - start, 3),
        problems=problems,
    )


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


def shards_with(source: Path, fingerprint: Fingerprint, keys: Iterable[str] | None) -> dict[str, int]:
    """The shards that hold these images, by default all, with their sizes in bytes."""
    index = Index.open(source, fingerprint.sha256)
    rows = [row for key in keys or () if (row := index.find(key)) is not None]
    names = index.shards if keys is None else {index.entry(row)[0] for row in rows}
    if not names:
        lacks = "none of the images asked for" if index.shards else "no finished shard"
        raise CacheError(f"{source} has {lacks}, so there is nothing to stage; build with: {BUILD_COMMAND}")
    return {name: num_bytes for name, num_bytes in index.shard_bytes.items() if name in names}


def is_staged(source: Path, folder: Path, name: str, num_bytes: int) -> bool:
    """Whether a shard is staged: the target has the same receipt, and a file of the right size."""
    try:
        mine, theirs = (receipt_path(place, name).read_bytes() for place in (folder, source))
        return mine == theirs and shard_path(folder, name).stat().st_size == num_bytes
    except FileNotFoundError:
        return False


def copy_small_files(source: Path, folder: Path, fingerprint: Fingerprint) -> None:
    """Copy manifest, plan and quarantine; raises CacheMismatch if the folder holds another cache."""
    if not create_text(folder / MANIFEST, (source / MANIFEST).read_text()):
        check_fingerprint(folder, read_manifest(folder), fingerprint)
    for path in plan_files(source):
        create_text(folder / path.name, path.read_text())
    if (source / QUARANTINE).exists():
        write_text(folder / QUARANTINE, (source / QUARANTINE).read_text())


def copy_shard(source: Path, folder: Path, name: str, fingerprint: Fingerprint, on_block: OnBlock) -> list[Problem]:
    """Copy a shard and then its receipt, unless the source has problems; returns these."""
    receipt, path = read_receipt(source, name), shard_path(folder, name)
    receipt_path(folder, name).unlink(missing_ok=True)  # without it the shard is not used while it is copied again
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, receipt.size_bytes) as temporary, temporary.open("xb", buffering=0) as file:

        def write(block: memoryview, offset: int) -> None:
            on_block(block, offset)
            write_all(file.fileno(), block, offset)

        problems = list(check_shard(source, receipt, fingerprint, every_byte=True, on_block=write))
    if problems:
        path.unlink()
    else:
        write_text(receipt_path(folder, name), receipt_path(source, name).read_text())
    return problems
