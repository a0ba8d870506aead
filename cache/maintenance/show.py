"""Everything that a cache knows about one image: the report behind `cache show`.

The image is named by its file, its key, or the first digits of its key. Norms and peaks of the features are those that
the receipt has, computed when the image was encoded; the checksum shows whether the bytes are still the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lookonce.cache.format import BUILD_COMMAND, REPAIR_COMMAND, Grid
from lookonce.cache.store.metadata import Plan, read_plan, read_receipt
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.datasets.images import image_key
from lookonce.errors import CacheCorrupt, ImageError, UsageError
from lookonce.text import count, rows, size, table

MIN_DIGITS = 4
"""Digits of a key that are needed to search for it."""
NUM_NAMED = 10
"""How many candidates a message lists."""


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
    norms: tuple[float, ...] = ()
    """The mean length of a token's vector, for each level; none in a receipt that was restored from its shard."""
    peaks: tuple[float, ...] = ()
    """The largest absolute value, for each level."""

    def text(self) -> str:
        state = {
            "encoded": "encoded",
            "quarantined": f"quarantined: {self.reason}",
            "planned": f"planned for {self.shard}, not encoded yet; run: {BUILD_COMMAND}",
        }[self.state]
        lines = [("image", self.key), *(("file", file) for file in self.files), ("state", state)]
        if self.grid_thw is None:
            return rows(lines)
        grid = " x ".join(map(str, self.grid_thw))
        lines += [
            ("tokens", f"{self.num_tokens:,}, from a patch grid {grid}"),
            ("features", f"{size(self.size_bytes)} of {self.dtype} at {self.offset:,} in {self.path}"),
            ("checksum", "ok" if self.checksum_ok else f"WRONG; run: {REPAIR_COMMAND}"),
        ]
        if not self.norms:
            return rows(lines)
        levels = enumerate(zip(self.norms, self.peaks, strict=True))
        cells = [(str(number), f"{norm:.4g}", f"{peak:.4g}") for number, (norm, peak) in levels]
        return f"{rows(lines)}\n\n{table(('level', 'norm', 'peak'), cells)}"


def show(cache: VisionCache, name: str) -> ShowReport:
    """Describe the image `name`: a file, a key, or the first digits of a key.

    Raises:
        UsageError: the cache knows no such image, or several.
    """
    plan = read_plan(cache.folder)
    key = find(cache, plan, name)
    files = list(dict.fromkeys(file for image in plan.images if image.key == key for file in image.files))
    if key in cache:
        return encoded(cache, key, files)
    if failure := cache.failed.get(key):
        return ShowReport(key, "quarantined", files or [failure.file], failure.reason)
    shard = next((shard.name for shard in plan.shards if key in shard.keys), "")
    if shard:
        return ShowReport(key, "planned", files, shard=shard)
    former = sorted({image.key for image in plan.images if name in image.files})
    changed = f"; the file was image {former[0]} when it was planned" if former else ""
    raise UsageError(f"{cache.folder} has no image {key} ({name}){changed}; encode it with: {BUILD_COMMAND}")


def find(cache: VisionCache, plan: Plan, name: str) -> str:
    """The key of the image `name`.

    Raises:
        UsageError: the cache knows no such image, or several; the message names some of these.
    """
    file_of = {image.key: image.files[0] if image.files else "" for image in plan.images}
    digits = name.lower()
    if re.fullmatch(f"[0-9a-f]{{{MIN_DIGITS},64}}", digits) and not Path(name).is_file():
        keys = {key for key in {*cache.keys(), *cache.failed, *file_of} if key.startswith(digits)}
        problem = f"no image whose key starts with {name}"
    else:
        try:
            return image_key(Path(name))
        except ImageError as error:  # missing, or the end of a path that the plan has
            keys = {image.key for image in plan.images if any(f"/{file}".endswith(f"/{name}") for file in image.files)}
            problem = f"no image {name!r} ({error})"
    if not keys:
        raise UsageError(f"{cache.folder} has {problem}; name a file or at least {MIN_DIGITS} digits of an image key")
    if len(keys) > 1:
        lines = [f"  {key}  {file_of.get(key, '')}".rstrip() for key in sorted(keys)[:NUM_NAMED]]
        lines += [f"  and {len(keys) - NUM_NAMED:,} more"] if len(keys) > NUM_NAMED else []
        head = f"{name} matches {count(len(keys), 'image')}; give more of the name or key:"
        raise UsageError("\n".join([head, *lines]))
    return keys.pop()


def encoded(cache: VisionCache, key: str, files: list[str]) -> ShowReport:
    shard, _ = cache.entry(key)
    is_intact = True
    try:
        cache[key]
    except CacheCorrupt:
        is_intact = False
    recorded = dict(vars(read_receipt(cache.folder, shard).images[key]))
    del recorded["xxh3_64"]
    return ShowReport(
        key=key,
        state="encoded",
        files=files,
        shard=shard,
        path=str(shard_path(cache.folder, shard)),
        dtype=cache.fingerprint.dtype,
        checksum_ok=is_intact,
        **recorded,
    )
