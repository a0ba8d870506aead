"""Which images a damaged shard has, and where they can be found again: in files, or in other shards."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lookonce.cache.constants import MAX_HEADER_BYTES, PARSE_ERRORS
from lookonce.cache.maintenance.checks import parse_header
from lookonce.cache.store.plan import Shard
from lookonce.cache.store.receipts import finished_shards, read_receipt
from lookonce.cache.store.shards import shard_path
from lookonce.datasets.images import ImageIndex, Size, bytes_key, image_size, read_many
from lookonce.errors import CacheCorrupt, ImageError

ImageFiles = dict[str, tuple[Path, Size | None]]
"""A file and the image size for each image key."""


def images_of_shard(folder: Path, planned: Shard) -> set[str] | None:
    """The images of a shard by its receipt, or else all that it may have by plan or header; None if unknown."""
    with contextlib.suppress(CacheCorrupt, OSError, *PARSE_ERRORS):
        return set(read_receipt(folder, planned.name).images)
    if planned.images:
        return set(planned.keys)
    with contextlib.suppress(OSError, ValueError), shard_path(folder, planned.name).open("rb") as file:
        tensors, _, _ = parse_header(file.read(MAX_HEADER_BYTES))
        return {name.partition(".")[0] for name in tensors}
    return None


def find_files(keys: set[str], planned: Shard, images: ImageIndex) -> ImageFiles:
    """Files that still have the bytes of these images: those of the run first, then those of the plan."""
    found: ImageFiles = {}
    of_run = {images.path_of[key] for key in keys if key in images.path_of}
    of_plan = {Path(file) for image in planned.images for file in image.files}
    for paths in (of_run, of_plan - of_run):
        if keys <= found.keys():
            break
        for path, data in read_many(sorted(paths)):
            if not isinstance(data, ImageError) and (key := bytes_key(data)) in keys:
                found.setdefault(key, (path, image_size(data)))
    return found


def images_elsewhere(folder: Path, damaged: set[str]) -> set[str]:
    """The images of all shards except the `damaged` ones."""
    keys: set[str] = set()
    for name in finished_shards(folder):
        if name not in damaged:
            with contextlib.suppress(CacheCorrupt, FileNotFoundError, *PARSE_ERRORS):
                keys |= read_receipt(folder, name).images.keys()
    return keys
