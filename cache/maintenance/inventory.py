"""What lies below a root of caches: each cache as a whole, who uses it, and what killed processes left.

Design: what counts as a leftover is what no reader and no builder can ever want (leftovers.py); "not in my data set"
does not. Which files are this program's is known by their names alone, so that it can also be told of a cache that is
damaged, or of another version.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lookonce.cache.constants import REPAIR_COMMAND
from lookonce.cache.store.claims import CLAIMS, EXPIRY_S, works
from lookonce.cache.store.index import INDEX, INDEX_CHECKSUM, Index
from lookonce.cache.store.leftovers import dead_claims, scratch_folders, temporaries, unfinished_shards
from lookonce.cache.store.manifest import BROKEN, MANIFEST, PLAN, QUARANTINE, read_manifest, read_plan
from lookonce.cache.store.receipts import RECEIPTS, finished_shards
from lookonce.cache.store.shards import SHARDS
from lookonce.cache.store.uses import USES, uses
from lookonce.errors import CacheError
from lookonce.files import TEMPORARY_MARK
from lookonce.text import count, size

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

    def lines(self) -> list[str]:
        lines = ["  ".join(cell for cell in self._cells() if cell)]
        lines += [f"  can not be read: {self.problem}"] if self.problem else []
        lines += [f"  used by {run}" for run in self.used_by]
        lines += [leftover.line(self.folder) for leftover in self.leftovers]
        foreign = self.foreign[:NOT_OURS]
        more = f" and {len(self.foreign) - NOT_OURS:,} more" if len(self.foreign) > NOT_OURS else ""
        return [*lines, *([f"  not ours: {', '.join(foreign)}{more}"] if foreign else [])]

    def _cells(self) -> tuple[str, ...]:
        images = "?" if self.num_images is None else f"{self.num_images:,}"
        return self.id, f"{images} images", size(self.size_bytes), self._state(), self.created[:10], self.model

    def _state(self) -> str:
        if self.problem:
            return "unreadable"
        state = "complete" if self.is_complete else "incomplete"
        return f"{state}, {count(self.num_workers, 'worker')} alive" if self.num_workers else state


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
        num_workers=sum(alive for _, _, alive in works(folder, expiry_s)),
        used_by=[use.run for use in uses(folder)],
        leftovers=leftovers,
        foreign=[str(path.relative_to(folder)) for path in sorted(files) if not is_ours(folder, path)],
        problem=problem,
    )


def scratch_leftovers(root: Path) -> list[Leftover]:
    """What killed measurements left in a folder of caches."""
    return [
        Leftover(path, "scratch folder", sum(file.lstat().st_size for file in files_below(path)))
        for path in scratch_folders(root)
    ]


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder; a link to a folder is one, and not looked into."""
    for parent, folders, names in os.walk(folder):
        links = (name for name in folders if os.path.islink(os.path.join(parent, name)))
        yield from (Path(parent, name) for name in (*names, *links))


def is_ours(folder: Path, path: Path) -> bool:
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
