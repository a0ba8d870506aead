"""What lies below a root of caches, who uses it, and what may go: the report behind `cache gc`.

Design: nothing is deleted unless asked for, and a whole cache only by its name. What counts as a leftover is what no
reader and no builder can ever want (leftovers.py); "not in my data set" does not. Files that this program did not write
are listed and never touched: a cache is deleted file by known file, and its folder only once it is empty. Receipts go
first and the manifest last, so that a deletion that was interrupted leaves no shard that claims to be whole, and can be
gone on with.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lookonce.cache.names import REPAIR_COMMAND
from lookonce.cache.store.claims import CLAIMS, EXPIRY_S, Claims, Worker, bury, works
from lookonce.cache.store.folder import BROKEN, MANIFEST, PLAN, QUARANTINE, read_manifest, read_plan
from lookonce.cache.store.index import INDEX, INDEX_CHECKSUM, Index
from lookonce.cache.store.leftovers import dead_claims, scratch_folders, temporaries, unfinished_shards
from lookonce.cache.store.receipts import RECEIPTS, finished_shards, has_receipt
from lookonce.cache.store.shards import SHARDS
from lookonce.cache.store.uses import USES, uses
from lookonce.errors import CacheError, UsageError
from lookonce.files import TEMPORARY_MARK
from lookonce.text import count, size

MIN_DIGITS = 8
"""Of a cache's name, to delete it."""
Kind = Literal["temporary file", "dead claim", "unfinished shard", "scratch folder"]
KNOWN = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(PLAN)}|plan-\d{{5,}}\.json|{re.escape(QUARANTINE)}"
    rf"|{re.escape(INDEX)}|{re.escape(INDEX_CHECKSUM)}|{USES}/[0-9a-f]{{16}}\.json"
    rf"|({RECEIPTS}|{CLAIMS})/shard-\d{{5,}}\.json|{SHARDS}/shard-\d{{5,}}\.safetensors"
)
"""The files of a cache, by their path in it."""
NOT_OURS = 10
"""How many foreign files a report names."""


@dataclass(frozen=True)
class Leftover:
    """Something that a killed process left."""

    path: Path
    kind: Kind
    size_bytes: int

    def line(self, folder: Path) -> str:
        return f"  {self.kind}: {self.path.relative_to(folder)}, {size(self.size_bytes)}"


@dataclass(frozen=True)
class CacheInfo:
    """A cache as a whole."""

    id: str
    folder: Path
    model: str
    dtype: str
    created: str
    num_images: int | None
    """None if that can not be told."""
    num_shards: int
    size_bytes: int
    """Of all its files."""
    is_complete: bool
    """Whether everything that was planned is there."""
    num_workers: int
    """Alive."""
    used_by: list[str]
    """Run folders."""
    leftovers: list[Leftover]
    foreign: list[str]
    """What this program did not write, by its path in the folder."""
    problem: str = ""
    """Why it can not be read."""

    def line(self) -> tuple[str, ...]:
        images = "?" if self.num_images is None else f"{self.num_images:,}"
        return self.id, f"{images} images", size(self.size_bytes), self.state(), self.created[:10], self.model

    def state(self) -> str:
        if self.problem:
            return "unreadable"
        state = "complete" if self.is_complete else "incomplete"
        return f"{state}, {count(self.num_workers, 'worker')} alive" if self.num_workers else state


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
            lines += ["", *_describe(cache)]
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


def _describe(cache: CacheInfo) -> list[str]:
    lines = ["  ".join(cell for cell in cache.line() if cell)]
    lines += [f"  can not be read: {cache.problem}"] if cache.problem else []
    lines += [f"  used by {run}" for run in cache.used_by]
    lines += [leftover.line(cache.folder) for leftover in cache.leftovers]
    foreign = cache.foreign[:NOT_OURS]
    more = f" and {len(cache.foreign) - NOT_OURS:,} more" if len(cache.foreign) > NOT_OURS else ""
    return [*lines, *([f"  not ours: {', '.join(foreign)}{more}"] if foreign else [])]


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
    scratch = [Leftover(path, "scratch folder", _size(path)) for path in scratch_folders(root)]
    return CollectReport(root, caches, scratch)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in _files(folder))


def cache_folders(place: Path) -> list[Path]:
    """The caches at or directly below a folder: what has a manifest that this program wrote, of whatever version."""
    candidates = [place] if (place / MANIFEST).exists() else sorted(path.parent for path in place.glob(f"*/{MANIFEST}"))
    return [folder for folder in candidates if _manifest(folder)]


def _manifest(folder: Path) -> dict[str, Any]:
    """What the manifest says; empty if it is none of ours."""
    with contextlib.suppress(OSError, ValueError):
        value = json.loads((folder / MANIFEST).read_text())
        if isinstance(value, dict) and {"format_version", "fingerprint", "sha256"} <= value.keys():
            return value
    return {}


def info(folder: Path, expiry_s: float = EXPIRY_S) -> CacheInfo:
    """Describe a cache."""
    manifest = _manifest(folder)
    provenance, fingerprint = dict(manifest.get("provenance") or {}), dict(manifest["fingerprint"])
    files = {path: path.lstat().st_size for path in _files(folder)}
    num_images, is_complete, problem = _content(folder)
    leftovers = [Leftover(path, kind, files.get(path, 0)) for path, kind in _leftovers(folder, expiry_s)]
    return CacheInfo(
        id=folder.name,
        folder=folder,
        model=str(provenance.get("model") or ""),
        dtype=str(fingerprint.get("dtype") or ""),
        created=str(provenance.get("created") or ""),
        num_images=num_images,
        num_shards=len(finished_shards(folder)),
        size_bytes=sum(files.values()),
        is_complete=is_complete,
        num_workers=sum(alive for _, _, alive in works(folder, expiry_s)),
        used_by=[use.run for use in uses(folder)],
        leftovers=leftovers,
        foreign=[str(path.relative_to(folder)) for path in sorted(files) if not _is_ours(folder, path)],
        problem=problem,
    )


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder; a link to a folder is one, and not looked into."""
    for parent, folders, names in os.walk(folder):
        links = (name for name in folders if os.path.islink(os.path.join(parent, name)))
        yield from (Path(parent, name) for name in (*names, *links))


def _is_ours(folder: Path, path: Path) -> bool:
    return TEMPORARY_MARK in path.name or bool(KNOWN.fullmatch(path.relative_to(folder).as_posix()))


def _content(folder: Path) -> tuple[int | None, bool, str]:
    """How many images there are, whether all that was planned is there, and why that can not be told."""
    try:
        index = Index.open(folder, read_manifest(folder).sha256)
        plan, finished = read_plan(folder), set(index.shards)
    except (CacheError, OSError, *BROKEN) as error:
        return None, False, str(error).partition(";")[0]
    if not finished and _has_shards(folder):
        return None, False, f"it has lost its receipts; write them anew with: {REPAIR_COMMAND}"
    pending = (key for shard in plan.shards if shard.name not in finished for key in shard.keys)
    is_complete = bool(finished) and all(index.find(key) is not None or key in index.failed for key in pending)
    return len(index), is_complete, ""


def _has_shards(folder: Path) -> bool:
    return any((folder / SHARDS).glob("*.safetensors"))


def _leftovers(folder: Path, expiry_s: float) -> Iterator[tuple[Path, Kind]]:
    yield from ((path, "temporary file") for path in temporaries(folder, expiry_s))
    yield from ((path, "dead claim") for path in dead_claims(folder, expiry_s))
    if finished_shards(folder):  # else all receipts are lost, and shards are what they can be made from
        yield from ((path, "unfinished shard") for path in unfinished_shards(folder, expiry_s))


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
    paths = [path for path in _files(cache.folder) if _is_ours(cache.folder, path)]
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
