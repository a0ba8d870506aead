"""Receipts: what a finished shard holds, and that it is finished. FORMAT.md specifies them.

Design: written last, so a shard that is there without one was never finished and does not count. A receipt holds what
reading needs (offset, size, grid, checksum of each image), so opening a cache reads no shard, and what became of the
images that could not be encoded, so that workers need no file in common to say it. Its first line is a checksum of all
that follows: a flipped byte in a receipt is found as surely as one in a shard.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from lookonce.cache.constants import FORMAT_VERSION, REPAIR_COMMAND
from lookonce.errors import CacheCorrupt
from lookonce.files import create_text
from lookonce.threads import ahead

RECEIPTS = "receipts"
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """Where the features of one image lie, and what they must be."""

    offset: int
    """In the shard file, of the first byte."""
    size_bytes: int
    num_tokens: int
    grid_thw: Grid
    xxh3_64: str
    norms: tuple[float, ...] = ()
    """For each level, the mean length of a token's vector."""
    peaks: tuple[float, ...] = ()
    """For each level, the largest absolute value."""


@dataclass(frozen=True)
class Failure:
    """Why an image has no features."""

    file: str
    reason: str
    retry: bool = False
    """The file could not be read or had changed, which another build may find otherwise."""


@dataclass(frozen=True)
class Receipt:
    """What a finished shard holds."""

    shard: str
    fingerprint: str
    """Full, of the cache it was made for."""
    size_bytes: int
    header_bytes: int
    """Of the shard file, before the features. `header_xxh3_64` covers them, the images' checksums all that follows."""
    header_xxh3_64: str
    host: str
    finished: float
    """Seconds since 1970."""
    seconds: float
    """Spent on reading, encoding and writing its images."""
    images: dict[str, Entry]
    failed: dict[str, Failure] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.shard}.json"


def receipt_path(folder: Path, shard: str) -> Path:
    return folder / RECEIPTS / f"{shard}.json"


def has_receipt(folder: Path, shard: str) -> bool:
    return receipt_path(folder, shard).exists()


def write_receipt(folder: Path, receipt: Receipt) -> bool:
    """Write a receipt; False if the shard has one already."""
    return create_text(receipt_path(folder, receipt.shard), to_text(receipt))


def to_text(receipt: Receipt) -> str:
    """A receipt as JSON, one image a line, that begins with a checksum of what follows it."""
    value = {"format_version": FORMAT_VERSION, **asdict(receipt)}
    body = ",\n".join(f"  {json.dumps(name)}: {_lines(item)}" for name, item in value.items()) + "\n}\n"
    return checksum_line(body.encode()) + body


def _lines(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    return "{\n" + ",\n".join(f"    {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n  }"


def checksum_line(body: bytes) -> str:
    return f'{{\n  "xxh3_64": "{xxhash.xxh3_64_hexdigest(body)}",\n'


LEN_CHECKSUM_LINE = len(checksum_line(b""))


def read_receipt(folder: Path, shard: str) -> Receipt:
    """The receipt of a shard.

    Raises:
        FileNotFoundError: it has none.
        CacheCorrupt: it is not what was written.
    """
    path = receipt_path(folder, shard)
    content = path.read_bytes()
    body = content[LEN_CHECKSUM_LINE:]
    if content[:LEN_CHECKSUM_LINE] != checksum_line(body).encode():
        raise CacheCorrupt(f"receipt {path} is not what was written; run: {REPAIR_COMMAND}")
    value: dict[str, Any] = json.loads(content)
    del value["xxh3_64"], value["format_version"]
    value["images"] = {key: _entry(entry) for key, entry in value["images"].items()}
    value["failed"] = {key: Failure(**failure) for key, failure in value["failed"].items()}
    receipt = Receipt(**value)
    if receipt.shard != shard:
        raise CacheCorrupt(f"receipt {path} is that of {receipt.shard}; run: {REPAIR_COMMAND}")
    return receipt


def _entry(value: dict[str, Any]) -> Entry:
    fields: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    return Entry(**fields)


def finished_shards(folder: Path) -> list[str]:
    """The names of the shards that have a receipt, in the order of their numbers."""
    names = (path.stem for path in (folder / RECEIPTS).glob("*.json"))
    return sorted(names, key=lambda name: (len(name), name))


def read_receipts(folder: Path) -> Iterator[Receipt]:
    """All receipts of a cache, in the order of their shards, few of them in memory at once.

    Raises:
        CacheCorrupt: one of them is not what was written.
    """

    def read(shard: str) -> Receipt | None:
        with contextlib.suppress(FileNotFoundError):  # removed by a repair since it was listed
            return read_receipt(folder, shard)
        return None

    return (receipt for receipt in ahead(read, finished_shards(folder)) if receipt)
