"""Everything that a cache knows about one image: the report behind `cache show`.

The image is named by its file, its key, or the first digits of its key. Statistics of the stored features are computed
again and shown next to those in the receipt, which were computed when the image was encoded.
"""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lookonce.cache.format import BUILD_COMMAND, REPAIR_COMMAND, Grid
from lookonce.cache.maintenance.checks import Region, checksum
from lookonce.cache.store.metadata import Entry, Plan, read_plan, read_receipt
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.datasets.images import image_key
from lookonce.errors import ImageError, UsageError
from lookonce.text import count, rows, size, table

MIN_DIGITS = 4
"""Digits of a key that are needed to search for it."""
NUM_NAMED = 10
"""How many candidates a message lists."""


@dataclass(frozen=True)
class LevelStats:
    """Statistics of one level of an image's features, now and in the receipt."""

    norm: float
    """Mean norm of a token's vector."""
    peak: float
    """Largest absolute value."""
    stored_norm: float | None
    stored_peak: float | None
    error: float | None
    """The larger relative difference of norm and peak; None if the receipt has none."""


@dataclass(frozen=True)
class ShowReport:
    """What a cache knows about an image."""

    key: str
    state: Literal["encoded", "quarantined", "planned"]
    files: list[str]
    """The image's files by the plan."""
    reason: str = ""
    """Why the image has no features."""
    shard: str = ""
    path: str = ""
    """Path of the shard."""
    offset: int = 0
    size_bytes: int = 0
    dtype: str = ""
    grid_thw: Grid | None = None
    num_tokens: int = 0
    checksum_ok: bool | None = None
    levels: tuple[LevelStats, ...] = ()

    def text(self) -> str:
        lines = [("image", self.key), *(("file", file) for file in self.files), ("state", self._state())]
        if self.grid_thw is None:
            return rows(lines)
        grid = " x ".join(map(str, self.grid_thw))
        lines += [
            ("tokens", f"{self.num_tokens:,}, from a patch grid {grid}"),
            ("features", f"{size(self.size_bytes)} of {self.dtype} at {self.offset:,} in {self.path}"),
            ("checksum", "ok" if self.checksum_ok else f"WRONG; run: {REPAIR_COMMAND}"),
        ]
        return "\n\n".join([rows(lines), *([self._table()] if self.levels else [])])

    def _state(self) -> str:
        return {
            "encoded": "encoded",
            "quarantined": f"quarantined: {self.reason}",
            "planned": f"planned for {self.shard}, not encoded yet; run: {BUILD_COMMAND}",
        }[self.state]

    def _table(self) -> str:
        lines = [
            (str(number), f"{level.norm:.4g}", f"{level.peak:.4g}", *_stored(level))
            for number, level in enumerate(self.levels)
        ]
        return table(("level", "norm", "peak", "norm in receipt", "peak in receipt", "difference"), lines)


def _stored(level: LevelStats) -> tuple[str, str, str]:
    if level.stored_norm is None or level.stored_peak is None or level.error is None:
        return "unknown", "", ""
    return f"{level.stored_norm:.4g}", f"{level.stored_peak:.4g}", f"{level.error:.1e}"


def show(cache: VisionCache, name: str) -> ShowReport:
    """Describe the image `name`: a file, a key, or the first digits of a key.

    Raises:
        UsageError: the cache knows no such image, or several.
    """
    plan = read_plan(cache.folder)
    key = find(cache, plan, name)
    files = [file for image in plan.images() if image.key == key for file in image.files]
    if key in cache:
        return _encoded(cache, key, files)
    if failure := cache.failed.get(key):
        return ShowReport(key, "quarantined", files or [failure.file], failure.reason)
    shard = next((shard.name for shard in plan.shards if key in shard.keys), "")
    if shard:
        return ShowReport(key, "planned", files, shard=shard)
    former = sorted({image.key for image in plan.images() if name in image.files})
    changed = f"; the file was image {former[0]} when it was planned" if former else ""
    raise UsageError(f"{cache.folder} knows no image {key} ({name}){changed}; encode it with: {BUILD_COMMAND}")


def find(cache: VisionCache, plan: Plan, name: str) -> str:
    """The key of the image `name`.

    Raises:
        UsageError: the cache knows no such image, or several; the message names some of these.
    """
    if re.fullmatch(f"[0-9a-f]{{{MIN_DIGITS},64}}", name.lower()) and not Path(name).is_file():
        found = _starting_with(cache, plan, name.lower())
        what = f"no image whose key starts with {name}"
    else:
        try:
            return image_key(Path(name))
        except ImageError as error:  # missing, or the end of a path that the plan has
            found = {
                image.key for image in plan.images() if any(f"/{file}".endswith(f"/{name}") for file in image.files)
            }
            what = f"no image {name!r} ({error})"
    if len(found) > 1:
        raise UsageError(_several(plan, name, sorted(found)))
    if not found:
        raise UsageError(f"{cache.folder} knows {what}; name a file or at least {MIN_DIGITS} digits of a key")
    return found.pop()


def _starting_with(cache: VisionCache, plan: Plan, digits: str) -> set[str]:
    first, last = (np.uint64(int(digits[:16].ljust(16, end), 16)) for end in "0f")
    prefix, keys = cache.index.columns["prefix"], cache.index.columns["key"]
    candidates = range(int(prefix.searchsorted(first)), int(prefix.searchsorted(last, side="right")))
    known = itertools.chain(
        (keys[row].tobytes().hex() for row in candidates), cache.failed, (image.key for image in plan.images())
    )
    return {key for key in known if key.startswith(digits)}


def _several(plan: Plan, name: str, keys: list[str]) -> str:
    file_of = {image.key: image.files[0] for image in plan.images() if image.files}
    lines = [f"  {key}  {file_of.get(key, '')}".rstrip() for key in keys[:NUM_NAMED]]
    more = [f"  and {len(keys) - NUM_NAMED:,} more"] if len(keys) > NUM_NAMED else []
    return "\n".join([f"{name} matches {count(len(keys), 'image')}; give more of the name or key:", *lines, *more])


def _encoded(cache: VisionCache, key: str, files: list[str]) -> ShowReport:
    shard, entry = cache.entry(key)
    path = shard_path(cache.folder, shard)
    unchecked = VisionCache(cache.folder, cache.fingerprint, check=False)
    return ShowReport(
        key=key,
        state="encoded",
        files=files,
        shard=shard,
        path=str(path),
        offset=entry.offset,
        size_bytes=entry.size_bytes,
        dtype=cache.fingerprint.dtype,
        grid_thw=entry.grid_thw,
        num_tokens=entry.num_tokens,
        checksum_ok=_has_checksum(path, entry),
        levels=level_stats(unchecked[key], read_receipt(cache.folder, shard).images[key]),
    )


def _has_checksum(path: Path, entry: Entry) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return checksum(descriptor, Region("", entry.offset, entry.size_bytes, "")) == entry.xxh3_64
    finally:
        os.close(descriptor)


def level_stats(features: torch.Tensor, entry: Entry) -> tuple[LevelStats, ...]:
    """Norm and peak of each level of features `[num_tokens, num_levels, hidden]`, and those in the receipt."""
    norms = torch.linalg.vector_norm(features, dim=-1, dtype=torch.float32).mean(0).tolist()
    peaks = features.abs().amax(-1).float().amax(0).tolist()
    stored: list[tuple[float | None, float | None]] = list(zip(entry.norms, entry.peaks, strict=True))
    stored = stored or [(None, None)] * len(norms)
    return tuple(_stats(norm, peak, *before) for norm, peak, before in zip(norms, peaks, stored, strict=True))


def _stats(norm: float, peak: float, stored_norm: float | None, stored_peak: float | None) -> LevelStats:
    if stored_norm is None or stored_peak is None:
        return LevelStats(norm, peak, None, None, None)
    pairs = ((norm, stored_norm), (peak, stored_peak))
    error = max(abs(now - before) / max(abs(before), 1e-30) for now, before in pairs)
    return LevelStats(norm, peak, stored_norm, stored_peak, error)
