"""List caches, and delete leftovers or a whole cache: the report behind `cache gc`.

Design: nothing is deleted without `--delete`, and a whole cache only by its name. Files that lookonce did not write are
listed and never touched: a cache is deleted one known file after another, and its folder only once it is empty.
Receipts are deleted first and the manifest last, so an interrupted deletion leaves no shard that looks finished, and
can be resumed.
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
    cache_info,
    files_below,
    is_ours,
    scratch_leftovers,
)
from lookonce.cache.store.claims import CLAIMS, OWNER, owning
from lookonce.cache.store.index import INDEX, INDEX_CHECKSUM
from lookonce.cache.store.manifest import MANIFEST
from lookonce.cache.store.receipts import RECEIPTS, has_receipt
from lookonce.cache.store.shards import SHARDS
from lookonce.cache.store.uses import USES
from lookonce.claim_file import EXPIRY_S, remove_if_dead
from lookonce.errors import CacheError, UsageError
from lookonce.text import count, listed, located, size

MIN_DIGITS = 8
"""Digits of a cache's name that are needed to delete it."""
COMMAND = "lookonce cache gc"
"""What a claim of this module names."""


@dataclass(frozen=True)
class GarbageReport:
    """All caches below a root, and what was deleted."""

    root: Path
    caches: list[CacheInfo]
    scratch: list[Leftover]
    """Scratch folders of killed measurements, next to the caches."""
    deleted: list[Path] = field(default_factory=list)
    deleted_bytes: int = 0
    deleted_cache: str = ""
    """Name of the cache that was deleted whole; empty if only leftovers were."""
    kept: list[Path] = field(default_factory=list)
    """Files of the deleted cache that lookonce did not write."""
    in_use: list[str] = field(default_factory=list)
    """Why the leftovers of some caches were not deleted: another process uses them."""

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
        if self.in_use:
            return "\n".join(f"kept leftovers: {reason}" for reason in self.in_use)
        if self.deleted:
            kept = f"; kept what is not ours: {listed([str(path) for path in self.kept], 1)}" if self.kept else ""
            whole = f"cache {self.deleted_cache}: " if self.deleted_cache else ""
            what = count(len(self.deleted), "file" if self.deleted_cache else "leftover")
            return f"deleted {whole}{what}, {size(self.deleted_bytes)}{kept}"
        if self.leftovers:
            total = sum(leftover.size_bytes for leftover in self.leftovers)
            return f"--delete removes {count(len(self.leftovers), 'leftover')}, {size(total)}"
        return "no leftovers" + ("; --delete --cache ID removes a whole cache" if self.caches else "")


def collect_garbage(
    root: Path, *, delete: bool = False, cache_id: str | None = None, expiry_s: float = EXPIRY_S
) -> GarbageReport:
    """List the caches at or below `root`; with `delete`, delete leftovers, or the whole cache `cache_id`.

    Raises:
        UsageError: `cache_id` is too short, ambiguous or unknown, or `delete` is missing.
        CacheError: that cache is in use, or `root` is not a folder.
    """
    if cache_id is not None and not delete:
        raise UsageError("--cache names the cache to delete; add --delete")
    if not root.is_dir():
        raise CacheError(f"no folder of caches at {located(root)}; name one, or a run file")
    found = list_caches(root, expiry_s)
    if not delete:
        return found
    if cache_id is not None:
        cache = choose(root, found.caches, cache_id)
        paths, num_bytes = delete_cache(cache, expiry_s)
        kept = [path for path in cache.folder.rglob("*") if path.is_file()] if cache.folder.exists() else []
        found.caches.remove(cache)
        return replace(found, deleted=paths, deleted_bytes=num_bytes, deleted_cache=cache.id, kept=kept)
    deleted, in_use = [], []
    for cache in found.caches:
        try:
            deleted += delete_leftovers(cache, expiry_s)
        except CacheError as error:
            in_use.append(str(error))
    for left in found.scratch:
        shutil.rmtree(left.path)
    deleted += found.scratch
    num_bytes = sum(left.size_bytes for left in deleted)
    paths = [left.path for left in deleted]
    return replace(list_caches(root, expiry_s), deleted=paths, deleted_bytes=num_bytes, in_use=in_use)


def list_caches(root: Path, expiry_s: float) -> GarbageReport:
    """The report without deleting anything."""
    caches = [cache_info(folder, expiry_s) for folder in cache_folders(root)]
    return GarbageReport(root, caches, scratch_leftovers(root))


def delete_leftovers(cache: CacheInfo, expiry_s: float = EXPIRY_S) -> list[Leftover]:
    """Delete the leftovers of a cache, unless they are no longer leftovers; returns the deleted ones.

    Raises:
        CacheError: another process uses the cache.
    """
    if not cache.leftovers:
        return []
    deleted = []
    with owning(cache.folder, COMMAND, expiry_s) as check_owned:
        for leftover in cache.leftovers:
            check_owned()
            if _delete(leftover, cache.folder, expiry_s):
                deleted.append(leftover)
    return deleted


def _delete(leftover: Leftover, folder: Path, expiry_s: float) -> bool:
    path = leftover.path
    if leftover.kind == "dead claim":
        return remove_if_dead(path, expiry_s)
    if leftover.kind == "unfinished shard" and has_receipt(folder, path.stem):
        return False  # it got its receipt after it was listed
    path.unlink(missing_ok=True)
    return True


def choose(root: Path, caches: Sequence[CacheInfo], cache_id: str) -> CacheInfo:
    """The cache whose name starts with `cache_id`, if it may be deleted.

    Raises:
        UsageError: `cache_id` is too short, or matches none or several.
        CacheError: the cache is in use.
    """
    if len(cache_id) < MIN_DIGITS:
        raise UsageError(f"--cache {cache_id!r} is too short to delete by; give at least {MIN_DIGITS} digits")
    matching = [cache for cache in caches if cache.id.startswith(cache_id)]
    if len(matching) != 1:
        names = ", ".join(cache.id for cache in matching or caches) or "nothing"
        raise UsageError(f"--cache {cache_id} matches {count(len(matching), 'cache')} in {root}; there is: {names}")
    [cache] = matching
    if cache.num_workers:
        raise CacheError(f"{count(cache.num_workers, 'worker')} alive in {cache.folder}; stop them before deleting it")
    if cache.used_by:
        raise CacheError(f"{cache.folder} is used by {', '.join(cache.used_by)}; delete or move that run folder first")
    return cache


def delete_cache(cache: CacheInfo, expiry_s: float = EXPIRY_S) -> tuple[list[Path], int]:
    """Delete our files in a cache, and its folders if they are then empty; returns the files and their bytes.

    Raises:
        CacheError: another process uses the cache.
    """
    with owning(cache.folder, COMMAND, expiry_s) as check_owned:
        mine = cache.folder / CLAIMS / OWNER
        paths = [path for path in files_below(cache.folder) if is_ours(cache.folder, path) and path != mine]
        num_bytes = sum(path.lstat().st_size for path in paths)
        for path in sorted(paths, key=lambda path: _deletion_order(cache.folder, path)):
            check_owned()
            path.unlink(missing_ok=True)
    for folder in (*(cache.folder / name for name in (RECEIPTS, SHARDS, CLAIMS, USES)), cache.folder):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
    return paths, num_bytes


def _deletion_order(folder: Path, path: Path) -> int:
    """Sorts files for deletion: the index, then receipts, then the rest, the manifest last."""
    name = path.relative_to(folder).as_posix()
    return 0 if name in (INDEX, INDEX_CHECKSUM) else 1 if name.startswith(RECEIPTS) else 3 if name == MANIFEST else 2
