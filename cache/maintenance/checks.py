"""One shard against its receipt: what verify, repair and stage compare.

Design: a shard is a header and, after it, images without a gap, and its receipt has a checksum of each. So every byte
of the file is under exactly one checksum, and one flipped bit is told to the image. Files are read with `pread` in
pieces: memory is bounded whatever the size of an image, and large requests are what network filesystems want.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from lookonce.cache.store.dtypes import SCALE_SUFFIX
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.receipts import Receipt
from lookonce.cache.store.shards import FORMAT_NAME, shard_path
from lookonce.text import size

PIECE_BYTES = 8 << 20
NUM_THREADS = 8
"""Of those who read whole shards: reading and checksums release Python's lock."""
Part = Literal["manifest", "plan", "receipt", "shard", "header", "image"]
Take = Callable[[memoryview, int], object]
"""Is given each piece that was read, and its offset."""


def ignore(piece: memoryview, offset: int) -> None:
    """Take nothing."""


@dataclass(frozen=True)
class Problem:
    """Something that is not as it was written."""

    shard: str
    """Empty if it is none of a shard."""
    image: str
    """The key, if it is one image's."""
    what: str
    part: Part
    file: str = ""
    """The image's, if the plan names one."""

    def text(self) -> str:
        file = f" ({self.file})" if self.file else ""
        place = [self.shard, f"image {self.image}{file}" if self.image else ""]
        return ": ".join([*(name for name in place if name), self.what])


@dataclass(frozen=True)
class Region:
    """Bytes of a shard that have a checksum of their own."""

    key: str
    """Of the image; empty for the header."""
    offset: int
    size_bytes: int
    xxh3_64: str


def regions(receipt: Receipt) -> list[Region]:
    """The header and then the images, in their order in the file."""
    entries = sorted(receipt.images.items(), key=lambda item: item[1].offset)
    images = [Region(key, entry.offset, entry.size_bytes, entry.xxh3_64) for key, entry in entries]
    return [Region("", 0, receipt.header_bytes, receipt.header_xxh3_64), *images]


class Unreadable(OSError):
    """The disk does not give a piece of a shard."""


def checksum(descriptor: int, region: Region, take: Take = ignore) -> str:
    """The xxh3_64 of what lies in a region; if the file ends before it does, of what there is.

    Raises:
        Unreadable: the disk does not give it.
    """
    digest = xxhash.xxh3_64()
    offset, end = region.offset, region.offset + region.size_bytes
    while offset < end and (piece := _read(descriptor, min(PIECE_BYTES, end - offset), offset)):
        digest.update(piece)
        take(memoryview(piece), offset)
        offset += len(piece)
    return digest.hexdigest()


def _read(descriptor: int, num_bytes: int, offset: int) -> bytes:
    try:
        return os.pread(descriptor, num_bytes, offset)
    except OSError as error:
        raise Unreadable(error.errno, error.strerror) from None


def check_shard(
    folder: Path, receipt: Receipt, fingerprint: Fingerprint | None, *, every_byte: bool, take: Take
) -> list[Problem]:
    """What is wrong with a shard: presence, size and header, or `every_byte` and the places of its tensors too.

    Without a fingerprint, because the manifest is broken, the shapes of tensors are not compared.
    """
    path = shard_path(folder, receipt.shard)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = f"{path} is missing" if missing else f"can not read {path}: {error.strerror}"
        return [Problem(receipt.shard, "", what, "shard")]
    try:
        return list(_check_open_shard(descriptor, receipt, fingerprint, every_byte, take))
    finally:
        os.close(descriptor)


def _check_open_shard(
    descriptor: int, receipt: Receipt, fingerprint: Fingerprint | None, every_byte: bool, take: Take
) -> Iterator[Problem]:
    found = os.fstat(descriptor).st_size
    if found != receipt.size_bytes:
        what = f"the shard has {found:,} bytes, its receipt says {receipt.size_bytes:,}"
        yield Problem(receipt.shard, "", what, "shard")
    header, *images = regions(receipt)
    broken = _check_region(descriptor, receipt, header, take)
    yield from broken
    if every_byte:
        for image in images:
            yield from _check_region(descriptor, receipt, image, take)
        yield from tiling(receipt)
        if fingerprint and not broken:
            content = os.pread(descriptor, header.size_bytes, 0)
            yield from agreement(content, receipt, fingerprint)


def _check_region(descriptor: int, receipt: Receipt, region: Region, take: Take) -> list[Problem]:
    try:
        if checksum(descriptor, region, take) == region.xxh3_64:
            return []
        what = "do not have the checksum of the receipt"
    except Unreadable as error:  # and nothing that `take` may raise
        what = f"can not be read: {error.strerror}"
    if region.key:
        return [Problem(receipt.shard, region.key, f"its bytes {what}", "image")]
    return [Problem(receipt.shard, "", f"the bytes of its header {what}", "header")]


def tiling(receipt: Receipt) -> Iterator[Problem]:
    """Where the images of a receipt leave bytes of the shard to nobody, or to two."""
    end = receipt.header_bytes
    for region in regions(receipt)[1:]:
        if region.offset != end:
            how = "leave a hole" if region.offset > end else "overlap"
            what = f"its place in the receipt, {region.offset:,}, should be {end:,}: images {how}"
            yield Problem(receipt.shard, region.key, what, "receipt")
        end = region.offset + region.size_bytes
    if end != receipt.size_bytes:
        what = f"the images in the receipt end at {end:,}, the shard at {receipt.size_bytes:,}"
        yield Problem(receipt.shard, "", what, "receipt")


def agreement(content: bytes, receipt: Receipt, fingerprint: Fingerprint) -> Iterator[Problem]:
    """Where the safetensors header of a shard, from its bytes, says something else than the receipt."""
    try:
        found, metadata, _ = parse_header(content)
    except ValueError as error:
        yield Problem(receipt.shard, "", f"the header {error}", "header")
        return
    if metadata.get("fingerprint") != receipt.fingerprint:
        yield Problem(receipt.shard, "", "the header names another fingerprint than the receipt", "header")
    expected = tensors(receipt, fingerprint)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            what = f"the header says {found.get(name)}, by its receipt it should be {expected.get(name)}"
            yield Problem(receipt.shard, name.removesuffix(SCALE_SUFFIX), what, "header")
    grids = {key: list(entry.grid_thw) for key, entry in receipt.images.items()}
    if metadata["grid_thw"] != grids:
        yield Problem(receipt.shard, "", "the header has other patch grids than the receipt", "header")


def tensors(receipt: Receipt, fingerprint: Fingerprint) -> dict[str, Any]:
    """The tensors of a shard as its safetensors header must describe them."""
    storage, levels, hidden = fingerprint.storage, fingerprint.num_levels, fingerprint.hidden_size
    described: dict[str, Any] = {}
    for key, entry in receipt.images.items():
        shape = [entry.num_tokens, levels, hidden]
        begin = entry.offset - receipt.header_bytes
        middle = begin + entry.num_tokens * levels * hidden * storage.stored_bytes
        end = begin + entry.size_bytes
        described[key] = {"dtype": storage.code, "shape": shape, "data_offsets": [begin, middle]}
        if storage.is_scaled:
            described[key + SCALE_SUFFIX] = {"dtype": "F32", "shape": shape[:2], "data_offsets": [middle, end]}
    return described


def parse_header(content: bytes) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The tensors and the metadata (patch grids read) in the first bytes of a shard, and where its features begin.

    Raises:
        ValueError: they are no header of a shard; says how not.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise ValueError(f"claims {size(length)}, more than there is")
    try:
        described = json.loads(content[8 : 8 + length])
        metadata = described.pop("__metadata__")
        metadata["grid_thw"] = json.loads(metadata["grid_thw"])
        name = metadata["format"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"can not be understood ({error!r})") from None
    if name != FORMAT_NAME:
        raise ValueError(f"is of the format {name!r}, not {FORMAT_NAME!r}")
    return described, metadata, 8 + length
