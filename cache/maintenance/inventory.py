"""List the caches below a folder, the runs that use them, and what killed processes left.

Design: a leftover is a file that no reader and no build can ever need (leftovers.py); features of images outside one's
dataset are not leftovers. Our files are recognised by name alone, which also works for caches that are damaged or of
another version.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lookonce.cache.constants import PARSE_ERRORS, REPAIR_COMMAND
from lookonce.cache.maintenance.checks import without_advice
from lookonce.cache.store.claims import CLAIMS, claimed_work
from lookonce.cache.store.index import INDEX, INDEX_CHECKSUM, Index
from lookonce.cache.store.leftovers import dead_claims, scratch_folders, temporary_files, unfinished_shards
from lookonce.cache.store.manifest import MANIFEST, PLAN, QUARANTINE, read_manifest, read_plan
from lookonce.cache.store.receipts import RECEIPTS, finished_shards
from lookonce.cache.store.shards import SHARDS
from lookonce.cache.store.uses import USES, uses
from lookonce.claim_file import EXPIRY_S
from lookonce.errors import CacheError
from lookonce.files import TEMPORARY_MARK, read_json
from lookonce.text import count, listed, size

Kind = Literal["temporary file", "dead claim", "unfinished shard", "scratch folder"]
KNOWN = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(PLAN)}|plan-\d{{5,}}\.json|{re.escape(QUARANTINE)}"
    rf"|{re.escape(INDEX)}|{re.escape(INDEX_CHECKSUM)}|{USES}/[0-9a-f]{{16}}\.json"
    rf"|({RECEIPTS}|{CLAIMS})/shard-\d{{5,}}\.json|{SHARDS}/shard-\d{{5,}}\.safetensors"
    rf"|{CLAIMS}/(user-[0-9a-f]{{32}}|owner)\.json"
)
"""Matches the files of a cache by their path in it."""
NUM_FOREIGN = 10
"""How many foreign files a report names."""


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
    """A cache as a whole."""

    id: str
    folder: Path
    model: str
    dtype: str
    created: str
    num_images: int | None
    """None if the cache cannot be read."""
    num_shards: int
    size_bytes: int
    """Size of all files in the folder."""
    is_complete: bool
    """Whether every planned image is stored or in quarantine."""
    num_workers: int
    """Number of workers that are alive."""
    used_by: list[str]
    """Run folders that use the cache."""
    leftovers: list[Leftover]
    foreign: list[str]
    """Files that lookonce did not write, by their path in the folder."""
    problem: str = ""
    """Why the cache cannot be read."""

    def lines(self) -> list[str]:
        lines = ["  ".join(cell for cell in self._cells() if cell)]
        lines += [f"  cannot be read: {self.problem}"] if self.problem else []
        lines += [f"  used by {run}" for run in self.used_by]
        lines += [leftover.line(self.folder) for leftover in self.leftovers]
        return [*lines, *([f"  not ours: {listed(self.foreign, NUM_FOREIGN)}"] if self.foreign else [])]

    def _cells(self) -> tuple[str, ...]:
        images = "?" if self.num_images is None else f"{self.num_images:,}"
        return self.id, f"{images} images", size(self.size_bytes), self._state(), self.created[:10], self.model

    def _state(self) -> str:
        if self.problem:
            return "unreadable"
        state = "complete" if self.is_complete else "incomplete"
        return f"{state}, {count(self.num_workers, 'worker')} alive" if self.num_workers else state


def cache_folders(root: Path) -> list[Path]:
    """The caches at or directly below a folder: folders with a manifest that lookonce wrote, of any version."""
    candidates = [root] if (root / MANIFEST).exists() else sorted(path.parent for path in root.glob(f"*/{MANIFEST}"))
    return [folder for folder in candidates if _manifest(folder)]


def _manifest(folder: Path) -> dict[str, Any]:
    """The content of a manifest; empty if lookonce did not write it."""
    with contextlib.suppress(OSError, ValueError):
        value = read_json(folder / MANIFEST)
        if isinstance(value, dict) and {"format_version", "fingerprint", "sha256"} <= value.keys():
            return value
    return {}


def cache_info(folder: Path, expiry_s: float = EXPIRY_S) -> CacheInfo:
    """Describe a cache."""
    manifest = _manifest(folder)
    provenance, fingerprint = dict(manifest.get("provenance") or {}), dict(manifest["fingerprint"])
    files = {path: path.lstat().st_size for path in files_below(folder)}
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
        num_workers=sum(alive for _, _, alive in claimed_work(folder, expiry_s)),
        used_by=[use.run for use in uses(folder)],
        leftovers=leftovers,
        foreign=[str(path.relative_to(folder)) for path in sorted(files) if not is_ours(folder, path)],
        problem=problem,
    )


def scratch_leftovers(root: Path) -> list[Leftover]:
    """Scratch folders that killed measurements left in a folder of caches."""
    return [
        Leftover(path, "scratch folder", sum(file.lstat().st_size for file in files_below(path)))
        for path in scratch_folders(root)
    ]


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder. A link to a folder counts as a file and is not followed."""
    for parent, folders, names in os.walk(folder):
        links = (name for name in folders if os.path.islink(os.path.join(parent, name)))
        yield from (Path(parent, name) for name in (*names, *links))


def is_ours(folder: Path, path: Path) -> bool:
    return TEMPORARY_MARK in path.name or bool(KNOWN.fullmatch(path.relative_to(folder).as_posix()))


def _content(folder: Path) -> tuple[int | None, bool, str]:
    """The number of images, whether all planned images are done, and why the cache cannot be read."""
    try:
        index = Index.open(folder, read_manifest(folder).sha256)
        plan, finished = read_plan(folder), set(index.shards)
    except (CacheError, OSError, *PARSE_ERRORS) as error:
        return None, False, without_advice(error)
    if not finished and _has_shards(folder):
        return None, False, f"its receipts are lost; restore them with: {REPAIR_COMMAND}"
    pending = (key for shard in plan.shards if shard.name not in finished for key in shard.keys)
    is_complete = bool(finished) and all(index.find(key) is not None or key in index.failed for key in pending)
    return len(index), is_complete, ""


def _has_shards(folder: Path) -> bool:
    return any((folder / SHARDS).glob("*.safetensors"))


def _leftovers(folder: Path, expiry_s: float) -> Iterator[tuple[Path, Kind]]:
    yield from ((path, "temporary file") for path in temporary_files(folder, expiry_s))
    yield from ((path, "dead claim") for path in dead_claims(folder, expiry_s))
    if finished_shards(folder):  # without any receipt, they are rebuilt from the shards
        yield from ((path, "unfinished shard") for path in unfinished_shards(folder, expiry_s))
