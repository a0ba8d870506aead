"""Features on disk: one safetensors file a shard and one receipt that says it is whole. FORMAT.md specifies both.

Design: the receipt is written last, so a shard that is there without one was never finished and does not count. It
holds what reading needs (offset, size, grid, checksum of each image), so opening a cache reads receipts and no shards;
the shard's own metadata repeats the grids, so receipts can be rebuilt. Checksums are xxh3: 64 bits an image, taken
from memory before writing, so that reading checks the whole way through the disk; 128 bits a file, taken from disk.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from lookonce.cache.fingerprint import FORMAT_VERSION, Fingerprint, raw_bytes
from lookonce.cache.names import BUILD_COMMAND
from lookonce.errors import CacheCorrupt
from lookonce.files import atomic_write, hash_file, write_json

SHARDS, RECEIPTS = "shards", "receipts"
FORMAT_NAME = "lookonce-features"
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Entry:
    """Where the features of one image lie, and what they must be."""

    shard: str
    offset: int
    """In the shard file, of the first byte."""
    size_bytes: int
    num_tokens: int
    grid_thw: Grid
    xxh3_64: str


@dataclass(frozen=True)
class Receipt:
    """What a finished shard holds."""

    shard: str
    fingerprint: str
    """Full, of the cache it was made for."""
    size_bytes: int
    seconds: float
    """Spent on reading, encoding and writing its images."""
    entries: dict[str, Entry]


def shard_path(folder: Path, name: str) -> Path:
    return folder / SHARDS / f"{name}.safetensors"


def receipt_path(folder: Path, name: str) -> Path:
    return folder / RECEIPTS / f"{name}.json"


def write_shard(
    folder: Path,
    name: str,
    features: Mapping[str, torch.Tensor],
    grids: Mapping[str, Grid],
    fingerprint: Fingerprint,
    seconds: float,
) -> None:
    """Write one shard and then its receipt; after this the shard counts.

    `features` has a tensor per image key, `[num_tokens, num_levels, hidden]`; `grids` the (t, h, w) of each.
    """
    path = shard_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "format": FORMAT_NAME,
        "format_version": str(FORMAT_VERSION),
        "fingerprint": fingerprint.sha256,
        "grid_thw": json.dumps({key: list(grids[key]) for key in sorted(grids)}),
    }
    with atomic_write(path) as temporary:
        save_file({key: tensor.contiguous() for key, tensor in features.items()}, temporary, metadata)
    receipt = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint.sha256,
        "shard": name,
        "size_bytes": path.stat().st_size,
        "xxh3_128": hash_file(path),
        "host": socket.gethostname(),
        "seconds": round(seconds, 3),
        "images": _describe(path, features, grids),
    }
    write_json(receipt_path(folder, name), receipt)


def _describe(path: Path, features: Mapping[str, torch.Tensor], grids: Mapping[str, Grid]) -> dict[str, Any]:
    """What the receipt says of each image: places from the file's header, checksums from what was in memory."""
    header, data_start = read_header(path)
    return {
        key: {
            "grid_thw": list(grids[key]),
            "num_tokens": features[key].shape[0],
            "offset": data_start + header[key]["data_offsets"][0],
            "size_bytes": features[key].nbytes,
            "xxh3_64": xxhash.xxh3_64_hexdigest(raw_bytes(features[key])),
        }
        for key in sorted(features)
    }


def read_receipts(folder: Path) -> list[Receipt]:
    """All receipts of a cache, in the order of their shards.

    Raises:
        CacheCorrupt: one of them is not what was written.
    """
    paths = (folder / RECEIPTS).glob("*.json")
    return [_read_receipt(path) for path in sorted(paths, key=lambda path: (len(path.name), path.name))]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the offset at which its data starts."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    return header, 8 + size


def _read_receipt(path: Path) -> Receipt:
    try:
        value = json.loads(path.read_text())
        entries = {key: _entry(value["shard"], image) for key, image in value["images"].items()}
        return Receipt(value["shard"], value["fingerprint"], int(value["size_bytes"]), float(value["seconds"]), entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheCorrupt(f"receipt {path} is broken ({error!r}); delete it and run: {BUILD_COMMAND}") from None


def _entry(shard: str, image: dict[str, Any]) -> Entry:
    grid_t, grid_h, grid_w = image["grid_thw"]
    place = int(image["offset"]), int(image["size_bytes"]), int(image["num_tokens"])
    return Entry(shard, *place, (grid_t, grid_h, grid_w), image["xxh3_64"])
