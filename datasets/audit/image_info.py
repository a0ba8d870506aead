"""What is known of each image: its bytes, its size, and what is wrong with it.

Design: each file is read once and hashed, and its header is read, several files at a time; only a few files' bytes
are in memory at once. With `decode` the whole image is decoded, as the cache will do it, which finds truncated files
and costs ten to a hundred times as much as a header. Threads are enough, since Pillow releases Python's lock while it
decodes. Images come in the order of `ImageIndex.path_of`, in which a cache is planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from lookonce.datasets.archives import by_archive
from lookonce.datasets.images import Size, Trait, bytes_key, read_header, read_many
from lookonce.datasets.images import decode as decode_image
from lookonce.errors import BadImage, ImageError
from lookonce.threads import threaded_map

MIN_SIDE = 32
"""Smaller images are odd: 32 pixels are the side of one visual token of Qwen3-VL."""


@dataclass(frozen=True)
class ImageInfo:
    """One image file, or member of an archive."""

    path: Path
    key: str = ""
    """The sha256 of its bytes; empty if they cannot be read."""
    num_bytes: int = 0
    size: Size | None = None
    """Width and height from the header, as the image is shown; None if it cannot be encoded."""
    format: str = ""
    """The name that Pillow gives the format: JPEG, PNG, ..."""
    problem: str = ""
    """Why the image cannot be used; empty if nothing was found wrong with it."""
    traits: tuple[Trait, ...] = ()
    """What 8-bit RGB does not keep of it."""
    mode: str = ""
    """The name that Pillow gives its kind of pixels: RGB, L, ..."""

    @property
    def is_missing(self) -> bool:
        """Whether its bytes cannot be read."""
        return not self.key

    @property
    def oddity(self) -> str:
        """What is odd about its size; empty if nothing is."""
        width, height = self.size or (MIN_SIDE, MIN_SIDE)
        if min(width, height) < MIN_SIDE:
            return f"{width} x {height} pixels, less than {MIN_SIDE} on a side"
        return ""


def inspect_images(paths: Iterable[Path], *, decode: bool = False) -> dict[Path, ImageInfo]:
    """Inspect each image once; single files come first, by key, then archive by archive, and missing images last."""
    paths = sorted(set(paths))
    files, members_of = by_archive(paths)
    with tqdm(total=len(paths), desc="inspect images", unit="image", leave=False, disable=None) as progress:

        def inspected(bytes_of: Iterator[tuple[Path, bytes | ImageError]]) -> list[ImageInfo]:
            found = []
            for info in threaded_map(partial(_inspect, decode=decode), bytes_of):
                progress.update()
                found.append(info)
            return found

        single = inspected(read_many(files))
        members = inspected(read_many(path for archive in members_of.values() for path in archive))
    found = sorted(single, key=lambda info: (info.key, info.path)) + members
    return {info.path: info for info in sorted(found, key=lambda info: info.is_missing)}


def distinct(images: Mapping[Path, ImageInfo]) -> dict[str, ImageInfo]:
    """Return one image for each key, in the order in which they are read fastest."""
    found: dict[str, ImageInfo] = {}
    for info in images.values():
        if info.key:
            found.setdefault(info.key, info)
    return found


def _inspect(read: tuple[Path, bytes | ImageError], *, decode: bool) -> ImageInfo:
    path, data = read
    if isinstance(data, ImageError):
        return ImageInfo(path, problem=str(data))
    key = bytes_key(data)
    try:
        header = read_header(data, path)
        if decode:
            decode_image(data, path)
    except BadImage as error:
        return ImageInfo(path, key, len(data), problem=str(error))
    return ImageInfo(path, key, len(data), header.size, header.format, traits=header.traits, mode=header.mode)
