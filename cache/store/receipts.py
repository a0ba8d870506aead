"""Receipts: what a finished shard holds, and the proof that it is finished. FORMAT.md specifies them.

Design: a receipt is written last, so a shard without one was never finished and does not count. It has what reading
needs (offset, size, grid and checksum of each image), so opening a cache opens no shard, and the failures of images
that could not be encoded, so workers share no file for them. Its first line is a checksum of all that follows: a
flipped byte in a receipt is detected as surely as one in a shard.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from lookonce.cache.constants import (
    FORMAT_VERSION,
    MAX_RECORDS_BYTES,
    PARSE_ERRORS,
    REPAIR_COMMAND,
    Grid,
)
from lookonce.errors import CacheCorrupt
from lookonce.files import create_text, parse_json, read_limited
from lookonce.text import shown
from lookonce.threads import threaded_map

RECEIPTS = "receipts"
KEY = re.compile("[0-9a-f]{64}")
"""An image key."""


@dataclass(frozen=True)
class Entry:
    """Offset, size and checksum of the features of one image in a shard."""

    offset: int
    """The offset of the first byte in the shard file."""
    size_bytes: int
    num_tokens: int
    grid_thw: Grid
    xxh3_64: str
    norms: tuple[float, ...] = ()
    """The mean length of a token's vector, for each level."""
    peaks: tuple[float, ...] = ()
    """The largest absolute value, for each level."""


@dataclass(frozen=True)
class Failure:
    """Why an image has no features."""

    file: str
    reason: str
    retry: bool = False
    """Whether the next build tries again: the file could not be read, or had changed. Other failures are final."""


@dataclass(frozen=True)
class Receipt:
    """What a finished shard holds."""

    shard: str
    fingerprint: str
    """The fingerprint of the cache, all 64 digits."""
    size_bytes: int
    header_bytes: int
    """The bytes before the features, which `header_xxh3_64` covers; the images' checksums cover all that follows."""
    header_xxh3_64: str
    host: str
    finished: float
    """When the shard was finished, in seconds since 1970."""
    seconds: float
    """How long reading, encoding and writing the images took."""
    images: dict[str, Entry]
    failed: dict[str, Failure] = field(default_factory=dict)


def receipt_path(folder: Path, shard: str) -> Path:
    return folder / RECEIPTS / f"{shard}.json"


def has_receipt(folder: Path, shard: str) -> bool:
    return receipt_path(folder, shard).exists()


def write_receipt(folder: Path, receipt: Receipt) -> bool:
    """Write a receipt; False if the shard already has one."""
    return create_text(receipt_path(folder, receipt.shard), to_text(receipt))


def to_text(receipt: Receipt) -> str:
    """A receipt as JSON, one image per line, that begins with a checksum of what follows it."""
    dicts = {name: {key: vars(item) for key, item in vars(receipt)[name].items()} for name in ("images", "failed")}
    value = {"format_version": FORMAT_VERSION, **vars(receipt), **dicts}  # asdict copies, which takes twice the time
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
        FileNotFoundError: the shard has no receipt.
        CacheCorrupt: the receipt is damaged.
    """
    path = receipt_path(folder, shard)
    try:
        content = read_limited(path, MAX_RECORDS_BYTES)
        body = content[LEN_CHECKSUM_LINE:]
        if content[:LEN_CHECKSUM_LINE] != checksum_line(body).encode():
            raise CacheCorrupt(f"receipt {path} is damaged (wrong checksum); run: {REPAIR_COMMAND}")
        receipt = _receipt(parse_json(content))
    except PARSE_ERRORS as error:
        raise CacheCorrupt(f"receipt {path} is broken ({shown(repr(error))}); run: {REPAIR_COMMAND}") from None
    if receipt.shard != shard:
        raise CacheCorrupt(f"receipt {path} belongs to {shown(receipt.shard)}; run: {REPAIR_COMMAND}")
    return receipt


def _receipt(value: dict[str, Any]) -> Receipt:
    """The receipt of `to_text`; anything else is one of PARSE_ERRORS."""
    del value["xxh3_64"], value["format_version"]
    value["images"] = {_image_key(key): _entry(entry) for key, entry in value["images"].items()}
    value["failed"] = {key: _failure(failure) for key, failure in value["failed"].items()}
    receipt = Receipt(**value)
    for text in (receipt.shard, receipt.fingerprint, receipt.header_xxh3_64, receipt.host):
        text_of(text)
    natural(receipt.size_bytes), natural(receipt.header_bytes)
    _numbers((receipt.finished, receipt.seconds))
    return receipt


def _image_key(value: str) -> str:
    if not KEY.fullmatch(value):
        raise ValueError(f"{value!r} is not an image key")
    return value


def _entry(value: dict[str, Any]) -> Entry:
    fields: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    entry = Entry(**fields)
    for number in (entry.offset, entry.size_bytes, entry.num_tokens, *entry.grid_thw):
        natural(number)
    if len(entry.grid_thw) != 3:
        raise ValueError(f"{entry.grid_thw} is not a patch grid")
    text_of(entry.xxh3_64)
    _numbers((*entry.norms, *entry.peaks))
    return entry


def _failure(value: dict[str, Any]) -> Failure:
    failure = Failure(**value)
    text_of(failure.file), text_of(failure.reason)
    if type(failure.retry) is not bool:
        raise TypeError(f"{failure.retry!r} is not true or false")
    return failure


def natural(value: Any) -> int:
    """An integer from a file, from 0 on and of at most 64 bits; raises ValueError for everything else."""
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r} is not an integer from 0 to 2^64")
    return value


def text_of(value: Any) -> str:
    """A text from a file; raises TypeError for everything else."""
    if type(value) is not str:
        raise TypeError(f"{value!r} is not a text")
    return value


def _numbers(values: Iterable[Any]) -> None:
    for value in values:
        if type(value) not in (int, float):
            raise TypeError(f"{value!r} is not a number")


def finished_shards(folder: Path) -> list[str]:
    """The names of the shards with a receipt, in the order of their numbers."""
    names = (path.stem for path in (folder / RECEIPTS).glob("*.json"))
    return sorted(names, key=lambda name: (len(name), name))


def read_receipts(folder: Path) -> Iterator[Receipt]:
    """All receipts of a cache, in the order of their shards, only a few of them in memory at a time.

    Raises:
        CacheCorrupt: one of them is damaged.
    """

    def read(shard: str) -> Receipt | None:
        with contextlib.suppress(FileNotFoundError):  # removed by a repair after it was listed
            return read_receipt(folder, shard)
        return None

    return (receipt for receipt in threaded_map(read, finished_shards(folder)) if receipt)
