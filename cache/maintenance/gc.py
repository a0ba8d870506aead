"""List caches, the runs that use them and what killed processes left; delete leftovers or a whole cache (`cache gc`).

Design: nothing is deleted without `--delete`, and a whole cache only by its name. Our files are recognised by name
alone, which also works for caches that are damaged or of another version. Other files are listed and never touched: a
cache is deleted one known file after another, and its folder only once it is empty. Receipts are deleted first and the
manifest last, so an interrupted deletion leaves no shard that looks finished, and can be resumed.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lookonce.cache.format import PARSE_ERRORS
from lookonce.cache.maintenance.verify import without_advice
from lookonce.cache.store.claims import (
    CLAIMS,
    OWNER,
    USES,
    LeftoverKind,
    claimed_work,
    leftovers,
    owning,
    remove_leftover,
    scratch_folders,
    uses,
)
from lookonce.cache.store.metadata import (
    MANIFEST,
    PLAN,
    QUARANTINE,
    RECEIPTS,
    finished_shards,
    read_manifest,
    read_plan,
)
from lookonce.cache.store.reader import INDEX, INDEX_CHECKSUM, Index
from lookonce.cache.store.shards import SHARDS
from lookonce.claim_file import EXPIRY_S
from lookonce.errors import CacheError, UsageError
from lookonce.files import TEMPORARY_MARK, read_object
from lookonce.text import count, listed, located, size

Kind = LeftoverKind | Literal["scratch folder"]
KNOWN = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(PLAN)}|plan-\d{{5,}}\.json|{re.escape(QUARANTINE)}"
    rf"|{re.escape(INDEX)}|{re.escape(INDEX_CHECKSUM)}|{USES}/[0-9a-f]{{16}}\.json"
    rf"|({RECEIPTS}|{CLAIMS})/shard-\d{{5,}}\.json|{SHARDS}/shard-\d{{5,}}\.safetensors"
    rf"|{CLAIMS}/(user-([0-9a-f]{{32}}|stage)|owner)\.json"
)
"""Matches the files of a cache by their path in it."""
NUM_FOREIGN = 10
MIN_DIGITS = 8
"""Digits of a cache's name that are needed to delete it."""
COMMAND = "lookonce cache gc"


@dataclass(frozen=True)
class Leftover:
    """A file or folder that a killed process left."""

    path: Path
    kind: Kind
    size_bytes: int

    def line(self, folder: Path) -> str:
        return f"  {self.kind}: {self.path.relative_to(folder)}, {size(self.size_bytes)}"


@dataclass(frozen=True)
class CacheInfo:
    id: str
    folder: Path
    model: str
    dtype: str
    created: str
    num_images: int | None
    """Without variants; None if the cache cannot be read."""
    variants: dict[str, int]
    """Number of variants of images (`cache.augment`), by recipe."""
    num_shards: int
    size_bytes: int
    is_complete: bool
    """Whether every planned image is stored or in quarantine."""
    num_workers: int
    used_by: list[str]
    leftovers: list[Leftover]
    foreign: list[str]
    """Files that lookonce did not write, by their path in the folder."""
    problem: str = ""

    def lines(self) -> list[str]:
        images = "? images" if self.num_images is None else count(self.num_images, "image")
        images += f" and {count(sum(self.variants.values()), 'variant')}" if self.variants else ""
        state = "unreadable" if self.problem else "complete" if self.is_complete else "incomplete"
        if self.num_workers and not self.problem:
            state += f", {count(self.num_workers, 'worker')} alive"
        cells = (self.id, images, size(self.size_bytes), state, self.created[:10], self.model)
        return [
            "  ".join(cell for cell in cells if cell),
            *([f"  cannot be read: {self.problem}"] if self.problem else []),
            *(f"  {count(number, 'variant')} by {recipe}" for recipe, number in sorted(self.variants.items())),
            *(f"  used by {run}" for run in self.used_by),
            *(leftover.line(self.folder) for leftover in self.leftovers),
            *([f"  not made by lookonce: {listed(self.foreign, NUM_FOREIGN)}"] if self.foreign else []),
        ]


def cache_folders(root: Path) -> list[Path]:
    """The caches at or directly below a folder: folders with a manifest that lookonce wrote, of any version."""
    candidates = [root] if (root / MANIFEST).exists() else sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    return [folder for folder in candidates if _manifest(folder)]


def _manifest(folder: Path) -> dict[str, Any]:
    """The content of a manifest; empty if lookonce did not write it."""
    value = read_object(folder / MANIFEST)
    return value if {"format_version", "fingerprint", "sha256"} <= value.keys() else {}


def cache_info(folder: Path, expiry_s: float = EXPIRY_S) -> CacheInfo:
    manifest = _manifest(folder)
    provenance, fingerprint = dict(manifest.get("provenance") or {}), dict(manifest["fingerprint"])
    files = {path: path.lstat().st_size for path in files_below(folder)}
    num_images, variants, is_complete, problem = _content(folder)
    return CacheInfo(
        id=folder.name,
        folder=folder,
        model=str(provenance.get("model") or ""),
        dtype=str(fingerprint.get("dtype") or ""),
        created=str(provenance.get("created") or ""),
        num_images=num_images,
        variants=variants,
        num_shards=len(finished_shards(folder)),
        size_bytes=sum(files.values()),
        is_complete=is_complete,
        num_workers=sum(alive for _, _, alive in claimed_work(folder, expiry_s)),
        used_by=[use.run for use in uses(folder)],
        leftovers=[Leftover(path, kind, files.get(path, 0)) for path, kind in leftovers(folder, expiry_s)],
        foreign=[str(path.relative_to(folder)) for path in files if not is_ours(folder, path)],
        problem=problem,
    )


def files_below(folder: Path) -> list[Path]:
    """All files below a folder, sorted. A link to a folder counts as a file and is not followed."""
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def is_ours(folder: Path, path: Path) -> bool:
    return TEMPORARY_MARK in path.name or bool(KNOWN.fullmatch(path.relative_to(folder).as_posix()))


def _content(folder: Path) -> tuple[int | None, dict[str, int], bool, str]:
    """How many images and variants there are, whether all planned ones are done, and why the cache cannot be read."""
    try:
        index = Index.open(folder, read_manifest(folder).sha256)
        plan, finished = read_plan(folder), set(index.shards)
    except (CacheError, OSError, *PARSE_ERRORS) as error:
        return None, {}, False, without_advice(error)
    pending = (key for shard in plan.shards if shard.name not in finished for key in shard.keys)
    is_complete = bool(finished) and all(index.find(key) is not None or key in index.failed for key in pending)
    variants = Counter(one.recipe for key, one in plan.variants.items() if index.find(key) is not None)
    return len(index) - variants.total(), dict(variants), is_complete, ""  # `asdict` takes a Counter apart


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
    kept: list[str] = field(default_factory=list)
    """Files of the deleted cache that lookonce did not write, by their path in its folder."""
    in_use: list[str] = field(default_factory=list)
    """Why the leftovers of some caches were not deleted: another process uses them."""

    @property
    def leftovers(self) -> list[Leftover]:
        return [*self.scratch, *(leftover for cache in self.caches for leftover in cache.leftovers)]

    def text(self) -> str:
        total = sum(cache.size_bytes for cache in self.caches)
        lines = [f"{self.root}: {count(len(self.caches), 'cache')}, {size(total)}"]
        lines += [leftover.line(self.root) for leftover in self.scratch]
        for cache in self.caches:
            lines += ["", *cache.lines()]
        return "\n".join([*lines, "", self._advice()]).rstrip()

    def _advice(self) -> str:
        if self.in_use:
            return "\n".join(f"kept leftovers: {reason}" for reason in self.in_use)
        if self.deleted:
            kept = f"; kept what lookonce did not make: {listed(self.kept, 1)}" if self.kept else ""
            whole = f"cache {self.deleted_cache}: " if self.deleted_cache else ""
            items = count(len(self.deleted), "file" if self.deleted_cache else "leftover")
            return f"deleted {whole}{items}, {size(self.deleted_bytes)}{kept}"
        if self.leftovers:
            total = sum(leftover.size_bytes for leftover in self.leftovers)
            return f"--delete removes {count(len(self.leftovers), 'leftover')}, {size(total)}"
        whole = "; --delete --cache ID removes a whole cache" if self.caches else ""
        return f"no leftovers of killed processes{whole}"


def collect_garbage(
    root: Path, *, delete: bool = False, cache_id: str | None = None, expiry_s: float = EXPIRY_S
) -> GarbageReport:
    """List the caches at or below `root`; with `delete`, delete leftovers, or the whole cache `cache_id`.

    Raises:
        UsageError: `cache_id` is too short, ambiguous or unknown, or `delete` is missing.
        CacheError: that cache is in use, or `root` is not a folder.
    """
    if cache_id is not None and not delete:
        raise UsageError("--cache works only with --delete, which deletes the named cache; add --delete")
    if not root.is_dir():
        raise CacheError(f"no folder of caches at {located(root)}; name one, or a run file")
    report = list_caches(root, expiry_s)
    if not delete:
        return report
    if cache_id is not None:
        cache = choose(root, report.caches, cache_id)
        paths, num_bytes = delete_cache(cache.folder, expiry_s)
        report.caches.remove(cache)
        return replace(report, deleted=paths, deleted_bytes=num_bytes, deleted_cache=cache.id, kept=cache.foreign)
    deleted, in_use = [*report.scratch], []
    for leftover in report.scratch:
        shutil.rmtree(leftover.path)
    for cache in report.caches:
        try:
            deleted += delete_leftovers(cache, expiry_s)
        except CacheError as error:
            in_use.append(str(error))
    num_bytes = sum(leftover.size_bytes for leftover in deleted)
    paths = [leftover.path for leftover in deleted]
    return replace(list_caches(root, expiry_s), deleted=paths, deleted_bytes=num_bytes, in_use=in_use)


def list_caches(root: Path, expiry_s: float) -> GarbageReport:
    """The report without deleting anything."""
    scratch = [
        Leftover(path, "scratch folder", sum(file.lstat().st_size for file in files_below(path)))
        for path in scratch_folders(root)
    ]
    return GarbageReport(root, [cache_info(folder, expiry_s) for folder in cache_folders(root)], scratch)


def delete_leftovers(cache: CacheInfo, expiry_s: float = EXPIRY_S) -> list[Leftover]:
    """Delete what are still leftovers of a cache, and return them; raises CacheError if it is in use."""
    deleted: list[Leftover] = []
    if cache.leftovers:
        with owning(cache.folder, COMMAND, expiry_s) as check_owned:
            for path, kind in [*leftovers(cache.folder, expiry_s)]:
                check_owned()
                num_bytes = path.stat().st_size
                remove_leftover(path, kind, expiry_s)
                deleted.append(Leftover(path, kind, num_bytes))
    return deleted


def choose(root: Path, caches: Sequence[CacheInfo], cache_id: str) -> CacheInfo:
    """The cache whose name starts with `cache_id`, if it may be deleted.

    Raises:
        UsageError: `cache_id` is too short, or matches none or several.
        CacheError: a run uses the cache.
    """
    if len(cache_id) < MIN_DIGITS:
        raise UsageError(
            f"--cache {cache_id!r} is too short to name a cache to delete; give at least {MIN_DIGITS} digits"
        )
    matching = [cache for cache in caches if cache.id.startswith(cache_id)]
    if len(matching) != 1:
        names = ", ".join(cache.id for cache in matching or caches) or "nothing"
        raise UsageError(
            f"--cache {cache_id} matches {count(len(matching), 'cache')} in {root}; choose one of: {names}"
        )
    [cache] = matching
    if cache.used_by:
        raise CacheError(f"{cache.folder} is used by {', '.join(cache.used_by)}; delete or move that run folder first")
    return cache


def delete_cache(folder: Path, expiry_s: float = EXPIRY_S) -> tuple[list[Path], int]:
    """Delete our files in a cache and its empty folders; returns files and bytes; raises CacheError if it is in use."""
    with owning(folder, COMMAND, expiry_s) as check_owned:
        mine = folder / CLAIMS / OWNER
        paths = [path for path in files_below(folder) if is_ours(folder, path) and path != mine]
        num_bytes = sum(path.lstat().st_size for path in paths)
        for path in sorted(paths, key=lambda path: (path.name == MANIFEST, path.parent.name != RECEIPTS)):
            check_owned()
            path.unlink(missing_ok=True)
    for name in (RECEIPTS, SHARDS, CLAIMS, USES, "."):
        with contextlib.suppress(OSError):  # not empty
            (folder / name).rmdir()
    return paths, num_bytes
