"""Everything that a cache knows about one image: the report behind `cache show`.

Norms and peaks of the features are those that the receipt has, computed when the image was encoded; the checksum shows
whether the bytes are still the same.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from lookonce.cache.format import BUILD_COMMAND, REPAIR_COMMAND, Grid
from lookonce.cache.model.pixels import on_white
from lookonce.cache.store.metadata import Plan, read_plan, read_receipt
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.datasets.augment import Augment
from lookonce.datasets.images import bytes_key, decode, image_key, read_bytes
from lookonce.errors import CacheCorrupt, ImageError, UsageError
from lookonce.text import count, first_few, rows, size, table

MIN_DIGITS = 4
"""Digits of a key that are needed to search for it."""
NUM_NAMED = 10
SHEET_PIXELS, SHEET_GAP = 320, 4
"""The longest side of a picture in a contact sheet, and the space between two."""


@dataclass(frozen=True)
class ShowReport:
    key: str
    state: Literal["encoded", "quarantined", "planned"]
    files: list[str]
    variant: str = ""
    """What was made of which image, if it is a variant."""
    variants: list[str] = field(default_factory=list)
    """The variants of it that are encoded or planned."""
    reason: str = ""
    shard: str = ""
    path: str = ""
    offset: int = 0
    size_bytes: int = 0
    dtype: str = ""
    grid_thw: Grid | None = None
    num_tokens: int = 0
    checksum_ok: bool | None = None
    norms: tuple[float, ...] = ()
    """The mean length of a token's vector, for each level; none in a receipt that was restored from its shard."""
    peaks: tuple[float, ...] = ()

    def text(self) -> str:
        state = {
            "encoded": "encoded",
            "quarantined": f"quarantined: {self.reason}",
            "planned": f"planned for {self.shard}, not encoded yet; run: {BUILD_COMMAND}",
        }[self.state]
        lines = [("image", self.key), *(("file", file) for file in self.files), ("state", state)]
        lines[1:1] = [("it is", self.variant)] if self.variant else []
        lines += [("has", variant) for variant in self.variants]
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
    """Describe an image: a file, a key, or its first digits; raises UsageError if there is none, or several."""
    plan = read_plan(cache.folder)
    key = find(cache, plan, name)
    files = list(dict.fromkeys(file for image in plan.images if image.key == key for file in image.files))
    variant = plan.names({key})[key] if key in plan.variants else ""
    about: dict[str, Any] = {"key": key, "files": files, "variant": variant, "variants": variants_of(cache, plan, key)}
    if key in cache:
        return encoded(cache, about)
    if failure := cache.failed.get(key):
        return ShowReport(state="quarantined", reason=failure.reason, **about | {"files": files or [failure.file]})
    shard = next((shard.name for shard in plan.shards if key in shard.keys), "")
    if shard:
        return ShowReport(state="planned", shard=shard, **about)
    former = sorted({image.key for image in plan.images if os.path.abspath(name) in image.files})
    changed = f"; the file was image {former[0]} when it was planned" if former else ""
    raise UsageError(f"{cache.folder} has no image {key} ({name}){changed}; encode it with: {BUILD_COMMAND}")


def find(cache: VisionCache, plan: Plan, name: str) -> str:
    """The key of the image `name`; raises UsageError if the cache knows no such image, or several, and names some."""
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
        lines = first_few([f"{key}  {file_of.get(key, '')}".rstrip() for key in sorted(keys)], NUM_NAMED)
        head = f"{name} matches {count(len(keys), 'image')}; give more of the name or key:"
        raise UsageError("\n".join([head, *lines]))
    return keys.pop()


def variants_of(cache: VisionCache, plan: Plan, key: str) -> list[str]:
    """The variants of an image, a text for each recipe."""
    numbers: dict[str, list[str]] = defaultdict(list)
    for variant in plan.variants.values():
        if variant.of == key:
            state = "" if variant.key in cache else " (not encoded)"
            numbers[variant.recipe].append(f"{variant.number}{state}")
    return [f"variants {', '.join(known)} by {recipe}" for recipe, known in sorted(numbers.items())]


def contact_sheet(path: Path, augment: Augment) -> Image.Image:
    """The image and its variants side by side, row by row; raises ImageError if the file is not an image."""
    data = read_bytes(path)
    picture = on_white(decode(data, path))
    pictures = [picture, *(variant.picture(picture) for variant in augment.of(bytes_key(data)))]
    for shown in pictures:
        shown.thumbnail((SHEET_PIXELS, SHEET_PIXELS))
    width, height = (side + SHEET_GAP for side in picture.size)
    columns = math.ceil(math.sqrt(len(pictures)))
    sheet = Image.new("RGB", (columns * width, math.ceil(len(pictures) / columns) * height), "white")
    for number, shown in enumerate(pictures):
        sheet.paste(shown, (number % columns * width, number // columns * height))
    return sheet


def encoded(cache: VisionCache, about: dict[str, Any]) -> ShowReport:
    key = about["key"]
    shard, _ = cache.entry(key)
    is_intact = True
    try:
        cache[key]
    except CacheCorrupt:
        is_intact = False
    recorded = dict(vars(read_receipt(cache.folder, shard).images[key]))
    del recorded["xxh3_64"]
    return ShowReport(
        state="encoded",
        shard=shard,
        path=str(shard_path(cache.folder, shard)),
        dtype=cache.fingerprint.dtype,
        checksum_ok=is_intact,
        **about,
        **recorded,
    )
