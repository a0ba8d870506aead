"""What is known of each image: its bytes, its size, and what is wrong with it.

Design: each file is read once, hashed, and its header decoded, some files at once; of the bytes only a few files' are
ever in memory. With `decode` the whole image is decoded as the cache will do it, which finds files that are cut short:
ten to a hundred times the work of a header. Pillow gives Python's lock free while it decodes, so threads do.
Images come in the order of `ImageIndex.path_of`, in which a cache is planned.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PIL import Image, ImageOps
from tqdm import tqdm

from lookonce.datasets.archives import by_archive
from lookonce.datasets.images import UNDECODABLE, Size, bytes_key, read_many
from lookonce.errors import ImageError
from lookonce.threads import ahead

MIN_SIDE = 32
"""Pixels: what Qwen3-VL makes one visual token of; a frame that is narrower shows nothing."""
MAX_RATIO = 200
"""Of the longer side to the shorter: Qwen's image processor refuses what is longer."""


@dataclass(frozen=True)
class Picture:
    """One image file, or member of an archive."""

    path: Path
    key: str = ""
    """The sha256 of its bytes; empty if there are none."""
    num_bytes: int = 0
    size: Size | None = None
    """Width and height, as the header says."""
    format: str = ""
    """Pillow's name of it: JPEG, PNG, ..."""
    problem: str = ""
    """Why it can not be used; empty if it can, as far as was looked."""

    @property
    def is_missing(self) -> bool:
        """There are no bytes to look at."""
        return not self.key

    @property
    def oddity(self) -> str:
        """What is strange about its size."""
        width, height = self.size or (MIN_SIDE, MIN_SIDE)
        if min(width, height) < MIN_SIDE:
            return f"{width} x {height} pixels, less than {MIN_SIDE} on a side"
        if max(width, height) > MAX_RATIO * min(width, height):
            return f"{width} x {height} pixels, more than {MAX_RATIO} times as long as wide"
        return ""


def look_at_pictures(paths: Iterable[Path], *, decode: bool = False) -> dict[Path, Picture]:
    """All images, each once: single files by key, then archive by archive; those without bytes last."""
    paths = sorted(set(paths))
    files, members_of = by_archive(paths)
    with tqdm(total=len(paths), desc="look at images", unit="image", leave=False, disable=None) as progress:

        def counted(bytes_of: Iterator[tuple[Path, bytes | ImageError]]) -> list[Picture]:
            found = []
            for picture in ahead(partial(_look_at, decode=decode), bytes_of):
                progress.update()
                found.append(picture)
            return found

        single = counted(read_many(files))
        members = counted(read_many(path for archive in members_of.values() for path in archive))
    found = sorted(single, key=lambda picture: (picture.key, picture.path)) + members
    return {picture.path: picture for picture in sorted(found, key=lambda picture: picture.is_missing)}


def distinct(pictures: Mapping[Path, Picture]) -> dict[str, Picture]:
    """One picture for each key, in the order in which images are best read."""
    found: dict[str, Picture] = {}
    for picture in pictures.values():
        if picture.key:
            found.setdefault(picture.key, picture)
    return found


def _look_at(read: tuple[Path, bytes | ImageError], *, decode: bool) -> Picture:
    path, data = read
    if isinstance(data, ImageError):
        return Picture(path, problem=str(data))
    key = bytes_key(data)
    if not data:
        return Picture(path, key, problem=f"{path} is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            size, kind = image.size, image.format or ""
            if decode:
                ImageOps.exif_transpose(image).convert("RGB")
    except (*UNDECODABLE, MemoryError) as error:
        reason = str(error) if decode and "cannot identify" not in str(error) else "it is of no known image format"
        return Picture(path, key, len(data), problem=f"can not decode {path}: {reason}")
    return Picture(path, key, len(data), size, kind)
