"""What lies below a root of caches, and what of it may go: the report behind `cache gc`, and deleting.

Design: nothing is deleted unless asked for, and a whole cache only by its name. Files that this program did not write
are listed and never touched: a cache is deleted file by known file, and its folder only once it is empty. Receipts go
first and the manifest last, so that a deletion that was interrupted leaves no shard that claims to be whole, and can be
gone on with.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lookonce.cache.maintenance.inventory import (
    CacheInfo,
    Leftover,
    cache_folders,
    files_below,
    info,
    is_ours,
    scratch_leftovers,
)
from lookonce.cache.store.claims import CLAIMS, EXPIRY_S, Claims, Worker, bury
from lookonce.cache.store.index import INDEX, INDEX_CHECKSUM
from lookonce.cache.store.manifest import MANIFEST
from lookonce.cache.store.receipts import RECEIPTS, has_receipt
from lookonce.cache.store.shards import SHARDS
from lookonce.cache.store.uses import USES
from lookonce.errors import CacheError, UsageError
from lookonce.text import count, size

MIN_DIGITS = 8
"""Of a cache's name, to delete it."""


@dataclass(frozen=True)
class CollectReport:
    """All caches below a root, and what was deleted."""

    root: Path
    caches: list[CacheInfo]
    scratch: list[Leftover]
    """Of killed measurements, beside the caches."""
    deleted: list[Path] = field(default_factory=list)
    deleted_bytes: int = 0
    deleted_cache: str = ""
    """Its name, if it was a whole one."""
    kept: list[Path] = field(default_factory=list)
    """Of a cache that was deleted: what is not this program's."""

    @property
    def leftovers(self) -> list[Leftover]:
        return [*self.scratch, *(leftover for cache in self.caches for leftover in cache.leftovers)]

    def text(self) -> str:
        lines = [self._head(), *(leftover.line(self.root) for leftover in self.scratch)]
        for cache in self.caches:
            lines += ["", *cache.lines()]
        return "\n".join([*lines, "", self._advice()]).rstrip()

    def _head(self) -> str:
        total = sum(cache.size_bytes for cache in self.caches)
        return f"{self.root}: {count(len(self.caches), 'cache')}, {size(total)}"

    def _advice(self) -> str:
        if self.deleted:
            kept = f"; {count(len(self.kept), 'file')} that are not ours stay: {self.kept[0]}" if self.kept else ""
            whole = f"cache {self.deleted_cache}: " if self.deleted_cache else ""
            what = count(len(self.deleted), "file" if self.deleted_cache else "leftover")
            return f"deleted {whole}{what}, {size(self.deleted_bytes)}{kept}"
        if self.leftovers:
            total = sum(leftover.size_bytes for leftover in self.leftovers)
            return f"--delete removes {count(len(self.leftovers), 'leftover')}, {size(total)}"
        return "no leftovers" + ("; --delete --cache ID removes a whole cache" if self.caches else "")


def collect(
    place: Path, *, delete: bool = False, cache_id: str | None = None, expiry_s: float = EXPIRY_S
) -> CollectReport:
    """List the caches below a root, or the one at `place`; `delete` removes leftovers, or the cache `cache_id` whole.

    Raises:
        UsageError: `cache_id` is too short, ambiguous, or none; or given without `delete`.
        CacheError: that cache is in use; or there is nothing at `place`.
    """
    if cache_id is not None and not delete:
        raise UsageError("--cache says which cache is to go; add --delete if it is to be deleted")
    if not place.is_dir():
        raise CacheError(f"no folder of caches at {place}; name one, or a run file")
    found = look(place, expiry_s)
    if not delete:
        return found
    if cache_id is not None:
        cache = choose(place, found.caches, cache_id)
        paths, num_bytes = delete_cache(cache)
        kept = [path for path in cache.folder.rglob("*") if path.is_file()] if cache.folder.exists() else []
        found.caches.remove(cache)
        return replace(found, deleted=paths, deleted_bytes=num_bytes, deleted_cache=cache.id, kept=kept)
    deleted = [left for cache in found.caches for left in delete_leftovers(cache, expiry_s)]
    for left in found.scratch:
        shutil.rmtree(left.path)
    deleted += found.scratch
    num_bytes = sum(left.size_bytes for left in deleted)
    return replace(look(place, expiry_s), deleted=[left.path for left in deleted], deleted_bytes=num_bytes)


def look(root: Path, expiry_s: float) -> CollectReport:
    """What is there."""
    caches = [info(folder, expiry_s) for folder in cache_folders(root)]
    return CollectReport(root, caches, scratch_leftovers(root))


def delete_leftovers(cache: CacheInfo, expiry_s: float = EXPIRY_S) -> list[Leftover]:
    """Delete the leftovers of a cache that still are some; gives those."""
    if not cache.leftovers:
        return []
    with Claims(cache.folder, Worker.this_process("gc"), expiry_s) as claims:
        return [leftover for leftover in cache.leftovers if _delete(leftover, claims)]


def _delete(leftover: Leftover, claims: Claims) -> bool:
    path = leftover.path
    if leftover.kind == "dead claim":
        return bury(path, claims.expiry_s)
    if leftover.kind == "temporary file":
        path.unlink(missing_ok=True)
        return True
    claim = claims.take(path.stem, 0)
    if claim is None:
        return False
    try:
        if has_receipt(claims.folder.parent, path.stem):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        claims.release(claim)


def choose(place: Path, caches: Sequence[CacheInfo], cache_id: str) -> CacheInfo:
    """The cache that is meant by the first digits of its name, if it may be deleted.

    Raises:
        UsageError: they are too few, or mean none or several.
        CacheError: it is in use.
    """
    if len(cache_id) < MIN_DIGITS:
        raise UsageError(f"--cache {cache_id!r} is too short to delete by; give at least {MIN_DIGITS} digits")
    meant = [cache for cache in caches if cache.id.startswith(cache_id)]
    if len(meant) != 1:
        names = ", ".join(cache.id for cache in meant or caches) or "nothing"
        raise UsageError(f"--cache {cache_id} means {count(len(meant), 'cache')} in {place}; there is: {names}")
    [cache] = meant
    if cache.num_workers:
        raise CacheError(f"{count(cache.num_workers, 'worker')} alive in {cache.folder}; end them before it is deleted")
    if cache.used_by:
        raise CacheError(
            f"{cache.folder} is used by {', '.join(cache.used_by)}; its use ends when that folder is moved or deleted"
        )
    return cache


def delete_cache(cache: CacheInfo) -> tuple[list[Path], int]:
    """Delete the files of a cache that are ours, and its folders if they are empty then; gives files and bytes."""
    paths = [path for path in files_below(cache.folder) if is_ours(cache.folder, path)]
    num_bytes = sum(path.lstat().st_size for path in paths)
    for path in sorted(paths, key=lambda path: _turn(cache.folder, path)):
        path.unlink(missing_ok=True)
    for folder in (*(cache.folder / name for name in (RECEIPTS, SHARDS, CLAIMS, USES)), cache.folder):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    return paths, num_bytes


def _turn(folder: Path, path: Path) -> int:
    """When a file is deleted: the index, then receipts, then the rest, the manifest last."""
    name = path.relative_to(folder).as_posix()
    return 0 if name in (INDEX, INDEX_CHECKSUM) else 1 if name.startswith(RECEIPTS) else 3 if name == MANIFEST else 2
