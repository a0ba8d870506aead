"""The index of a cache: shard and offset of each image, for caches of millions of images.

Design: columns in one safetensors file, sorted by key and memory-mapped; all processes share the memory. A look-up
is a binary search over the first 8 bytes of the keys. The index is derived from the receipts and records the size and
modification time of each; an index that does not match the receipts is ignored, and anyone may delete it. It takes 84
bytes per image on disk, which are read once at opening to verify the checksum. A cache without an index file works too:
its receipts are read instead.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from lookonce.cache.constants import FORMAT_VERSION, PARSE_ERRORS, REPAIR_COMMAND
from lookonce.cache.store.plan import SHARD_NAME
from lookonce.cache.store.receipts import RECEIPTS, Entry, Failure, Receipt, read_receipts, receipt_path
from lookonce.cache.store.shards import read_header
from lookonce.errors import CacheCorrupt
from lookonce.files import atomic_write, hash_file, parse_json, write_text
from lookonce.text import shown

INDEX, INDEX_CHECKSUM = "index.safetensors", "index.xxh3"
Columns = dict[str, NDArray[Any]]
DTYPES = {"U8": np.uint8, "U32": np.uint32, "U64": np.uint64, "I64": np.int64, "F64": np.float64}


@dataclass(frozen=True)
class Index:
    """All images of a cache; `Index.open` reads the index file or the receipts."""

    columns: Columns
    shards: Sequence[str]
    failed: dict[str, Failure]
    """Why images have no features, by image key."""

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> Index:
        """The index of a cache folder, from its file or from the receipts.

        Raises:
            CacheCorrupt: a receipt is damaged or belongs to another cache.
        """
        return read_index(folder, fingerprint) or cls.from_receipts(folder, fingerprint)

    @classmethod
    def from_receipts(cls, folder: Path, fingerprint: str) -> Index:
        """The index of the receipts in a cache folder; of several shards with an image the last counts."""
        found = file_stats(folder / RECEIPTS, ".json")  # first, so that a receipt replaced meanwhile is noticed
        shards: list[str] = []
        failed: dict[str, Failure] = {}
        tables = []
        for number, receipt in enumerate(read_receipts(folder)):
            _check_origin(folder, receipt, fingerprint)
            tables.append(_checked_columns(folder, number, receipt))
            failed |= receipt.failed
            shards.append(receipt.shard)
        columns = _sorted(tables) | _shard_columns(tables, _stamps(found, shards))
        index = cls(columns, shards, {})
        return replace(index, failed={key: why for key, why in failed.items() if index.find(key) is None})

    def __len__(self) -> int:
        return len(self.columns["prefix"])

    def keys(self) -> Iterator[str]:
        """The keys of all images, sorted."""
        return (bytes(key).hex() for key in self.columns["key"])

    def find(self, key: str) -> int | None:
        """The row of an image; None if the index does not have it."""
        prefix, keys = self.columns["prefix"], self.columns["key"]
        try:
            first = np.uint64(int.from_bytes(bytes.fromhex(key)[:8]))
        except ValueError:  # not an image key
            return None
        row = int(prefix.searchsorted(first))
        while row < len(prefix) and prefix[row] == first:
            if keys[row].tobytes().hex() == key:
                return row
            row += 1
        return None

    def entry(self, row: int) -> tuple[str, Entry]:
        """The shard of the image in a row, and its entry there."""
        column = self.columns
        grid_t, grid_h, grid_w = column["grid_thw"][row].tolist()
        entry = Entry(
            offset=int(column["offset"][row]),
            size_bytes=int(column["size_bytes"][row]),
            num_tokens=int(column["num_tokens"][row]),
            grid_thw=(grid_t, grid_h, grid_w),
            xxh3_64=f"{int(column['xxh3_64'][row]):016x}",
        )
        return self.shards[int(column["shard"][row])], entry

    def is_whole(self) -> bool:
        """Whether all columns have their types and lengths, and name shards that there are."""
        num_images, names = len(self.columns["prefix"]), EMPTY.keys() - set(SHARD_COLUMNS)
        return (
            all(
                self.columns[name].dtype == EMPTY[name].dtype
                and self.columns[name].shape == (num_images, *EMPTY[name].shape[1:])
                for name in names
            )
            and all(self.columns[name].shape == (len(self.shards),) for name in SHARD_COLUMNS)
            and bool((self.columns["shard"] < len(self.shards)).all())
            and all(SHARD_NAME.fullmatch(name) for name in self.shards)
        )

    def is_current(self, folder: Path) -> bool:
        """Whether the receipts in a folder are those that the index was made from."""
        found = file_stats(folder / RECEIPTS, ".json")
        stamps = _stamps(found, self.shards)
        return len(found) == len(self.shards) and all(
            np.array_equal(stamp, self.columns[name]) for name, stamp in stamps.items()
        )


def write_index(folder: Path, fingerprint: str) -> Index:
    """Write the index file of a cache from its receipts."""
    index = Index.from_receipts(folder, fingerprint)
    texts: dict[str, Any]
    texts = {"shards": list(index.shards), "failed": {key: asdict(why) for key, why in index.failed.items()}}
    with atomic_write(folder / INDEX) as temporary:
        columns = index.columns | {name: _text(value) for name, value in texts.items()}
        temporary.write_bytes(save(columns, _metadata(fingerprint)))  # `save_file` hides a full disk
        checksum = hash_file(temporary)
    write_text(folder / INDEX_CHECKSUM, checksum + "\n")
    return index


def read_index(folder: Path, fingerprint: str) -> Index | None:
    """The index of a cache from its file; None if that is missing, damaged or does not match the receipts."""
    path = folder / INDEX
    try:
        if hash_file(path) != (folder / INDEX_CHECKSUM).read_text().strip():
            return None
        header, start = read_header(path)
        if header["__metadata__"] != _metadata(fingerprint):
            return None
        content = np.asarray(np.memmap(path, np.uint8, "r", start))  # twice as fast to look up as a memmap
        columns = {name: _column(content, about) for name, about in header.items() if name != "__metadata__"}
        shards, failed = (parse_json(columns.pop(name).tobytes()) for name in ("shards", "failed"))
        index = Index(columns, shards, {key: Failure(**why) for key, why in failed.items()})
        return index if index.is_current(folder) and index.is_whole() else None
    except (OSError, *PARSE_ERRORS):
        return None


def _metadata(fingerprint: str) -> dict[str, str]:
    return {"format": "lookonce-index", "format_version": str(FORMAT_VERSION), "fingerprint": fingerprint}


def _check_origin(folder: Path, receipt: Receipt, fingerprint: str) -> None:
    if receipt.fingerprint != fingerprint:
        raise CacheCorrupt(
            f"{receipt_path(folder, receipt.shard)} belongs to another cache ({shown(receipt.fingerprint[:16])}); "
            f"run: {REPAIR_COMMAND}"
        )


def _column(content: NDArray[np.uint8], about: dict[str, Any]) -> NDArray[Any]:
    begin, end = about["data_offsets"]
    return content[begin:end].view(DTYPES[about["dtype"]]).reshape(about["shape"])


def _text(value: Any) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _checked_columns(folder: Path, number: int, receipt: Receipt) -> Columns:
    try:
        return _columns(number, receipt)
    except PARSE_ERRORS as error:  # numbers of more bits than the columns have, or a checksum that is not hexadecimal
        raise CacheCorrupt(
            f"{receipt_path(folder, receipt.shard)} is broken ({shown(repr(error))}); run: {REPAIR_COMMAND}"
        ) from None


def _columns(number: int, receipt: Receipt) -> Columns:
    """The images of one receipt as columns, unsorted, and the columns of its shard."""
    entries = list(receipt.images.values())
    keys = np.frombuffer(bytes.fromhex("".join(receipt.images)), np.uint8).reshape(-1, 32)
    return {
        "key": keys,
        "shard": np.full(len(entries), number, np.uint32),
        "offset": np.array([entry.offset for entry in entries], np.uint64),
        "size_bytes": np.array([entry.size_bytes for entry in entries], np.uint64),
        "num_tokens": np.array([entry.num_tokens for entry in entries], np.uint32),
        "grid_thw": np.array([entry.grid_thw for entry in entries], np.uint32).reshape(-1, 3),
        "xxh3_64": np.array([int(entry.xxh3_64, 16) for entry in entries], np.uint64),
        "shard_bytes": np.array([receipt.size_bytes], np.uint64),
        "shard_seconds": np.array([receipt.seconds], np.float64),
    }


EMPTY = _columns(0, Receipt("", "", 0, 0, "", "", 0.0, 0.0, {}))
SHARD_COLUMNS = ("shard_bytes", "shard_seconds")


def _sorted(tables: list[Columns]) -> Columns:
    """All rows sorted by key, each key once, from the last shard that has it."""
    columns = {
        name: np.concatenate([table[name] for table in [EMPTY, *tables]]) for name in EMPTY if name not in SHARD_COLUMNS
    }
    words = columns["key"].view(">u8").astype(np.uint64)
    order = np.lexsort(words.T[::-1])  # stable: equal keys stay in the order of their shards
    words = words[order]
    is_last = np.ones(len(words), bool)
    is_last[:-1] = (words[1:] != words[:-1]).any(axis=1)
    kept = order[is_last]
    return {name: column[kept] for name, column in columns.items()} | {"prefix": words[is_last, 0].copy()}


def _shard_columns(tables: list[Columns], stamps: Columns) -> Columns:
    columns = {name: [EMPTY[name][:0], *(table[name] for table in tables)] for name in SHARD_COLUMNS}
    return {name: np.concatenate(column) for name, column in columns.items()} | stamps


def _stamps(found: dict[str, os.stat_result], shards: Sequence[str]) -> Columns:
    """Size and modification time of each shard's receipt, 0 where it is missing."""
    stats = [found.get(shard) for shard in shards]
    return {
        "receipt_bytes": np.array([stat.st_size if stat else 0 for stat in stats], np.uint64),
        "receipt_time_ns": np.array([stat.st_mtime_ns if stat else 0 for stat in stats], np.int64),
    }


def file_stats(folder: Path, suffix: str) -> dict[str, os.stat_result]:
    """Stats of the files in a folder, by name without `suffix`, which they must have; none if the folder is missing."""
    found = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffix):
                with contextlib.suppress(FileNotFoundError):  # removed after it was listed
                    found[entry.name.removesuffix(suffix)] = entry.stat()
    return found
