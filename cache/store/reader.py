"""Features from disk: `VisionCache`, and the index that says where each image is, for caches of millions of images.

Design: one `pread` per image, straight into the memory that is returned (pinned, if it goes to a GPU), and a checksum:
a flipped bit is an error, never a training sample. Features are not memory-mapped: on network filesystems page faults
make that many times slower, and a truncated file reads as zeros.

The index has columns in one safetensors file, sorted by key and memory-mapped; all processes share the memory. A
look-up is a binary search over the first 8 bytes of the keys. The index is derived from the receipts and records the
size and modification time of each; without an index that matches them, they are read instead. It takes 84 bytes per
image, which are read once at opening to verify the checksum.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import FailFast, TypeAdapter
from safetensors.numpy import save

from lookonce.cache.format import BUILD_COMMAND, FORMAT_VERSION, PARSE_ERRORS, REPAIR_COMMAND, Grid, read_header
from lookonce.cache.store.fingerprint import Fingerprint, raw_bytes
from lookonce.cache.store.metadata import (
    MANIFEST,
    RECEIPTS,
    Entry,
    Failure,
    Receipt,
    ShardName,
    check_fingerprint,
    failures_of,
    mismatch_message,
    read_manifest,
    read_plan,
    read_receipts,
    receipt_path,
)
from lookonce.cache.store.shards import SHARDS, shard_path
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, FeaturesMissing, explain_os_error
from lookonce.files import atomic_write, hash_file, parse_json, read_json, threaded_map, write_text
from lookonce.text import located, shown

if TYPE_CHECKING:
    import torch


INDEX, INDEX_CHECKSUM = "index.safetensors", "index.xxh3"
Columns = dict[str, NDArray[Any]]
DTYPES = {"U8": np.uint8, "U32": np.uint32, "U64": np.uint64, "I64": np.int64, "F64": np.float64}
SHARD_COLUMNS = ("shard_bytes", "shard_seconds")
NUM_OPEN = 128
"""The most shard files that are kept open, far below the 1,024 that many systems allow a process."""


@dataclass(frozen=True)
class Index:
    """All images of a cache; `Index.open` reads the index file or the receipts."""

    columns: Columns
    shards: Sequence[str]
    failed: dict[str, Failure]
    """Why images have no features, by image key."""

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> Index:
        """The index, from its file or the receipts; raises CacheCorrupt if a receipt is damaged or of another cache."""
        return read_index(folder, fingerprint) or cls.from_receipts(folder, fingerprint)

    @classmethod
    def from_receipts(cls, folder: Path, fingerprint: str) -> Index:
        """The index of the receipts in a cache folder; of several shards with an image the last counts."""
        stats = file_stats(folder / RECEIPTS, ".json")  # first, so that a receipt replaced meanwhile is noticed
        shards: list[str] = []
        failed: dict[str, Failure] = {}
        tables = []
        for number, receipt in enumerate(read_receipts(folder)):
            if receipt.fingerprint != fingerprint:
                path, other_cache = receipt_path(folder, receipt.shard), shown(receipt.fingerprint[:16])
                raise CacheCorrupt(f"{path} belongs to another cache ({other_cache}); run: {REPAIR_COMMAND}")
            tables.append(_columns(number, receipt))
            failed |= receipt.failed
            shards.append(receipt.shard)
        index = cls(_joined(tables) | _stamps(stats, shards), shards, {})
        return replace(index, failed={key: failure for key, failure in failed.items() if index.find(key) is None})

    def __len__(self) -> int:
        return len(self.columns["prefix"])

    @cached_property
    def shard_bytes(self) -> dict[str, int]:
        return dict(zip(self.shards, self.columns["shard_bytes"].tolist(), strict=True))

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
        num_images, num_shards = len(self.columns["prefix"]), len(self.shards)
        return bool((self.columns["shard"] < num_shards).all()) and all(
            self.columns[name].dtype == column.dtype
            and self.columns[name].shape == (num_shards if name in SHARD_COLUMNS else num_images, *column.shape[1:])
            for name, column in EMPTY.items()
        )

    def is_current(self, folder: Path) -> bool:
        """Whether the receipts in a folder are those that the index was made from."""
        stats = file_stats(folder / RECEIPTS, ".json")
        stamps = _stamps(stats, self.shards)
        return len(stats) == len(self.shards) and all(
            np.array_equal(stamp, self.columns[name]) for name, stamp in stamps.items()
        )


def write_index(folder: Path, fingerprint: str) -> None:
    """Write the index file of a cache from its receipts."""
    index = Index.from_receipts(folder, fingerprint)
    texts = {"shards": index.shards, "failed": {key: asdict(failure) for key, failure in index.failed.items()}}
    with atomic_write(folder / INDEX) as temporary:
        columns = index.columns | {
            name: np.frombuffer(json.dumps(value).encode(), np.uint8) for name, value in texts.items()
        }
        temporary.write_bytes(save(columns, _metadata(fingerprint)))  # `save_file` hides a full disk
        checksum = hash_file(temporary)
    write_text(folder / INDEX_CHECKSUM, checksum + "\n")


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
        columns = {}
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                columns[name] = content[begin:end].view(DTYPES[about["dtype"]]).reshape(about["shape"])
        shards, failed = (parse_json(columns.pop(name).tobytes()) for name in ("shards", "failed"))
        index = Index(columns, _SHARDS.validate_python(shards), failures_of(failed))
        return index if index.is_current(folder) and index.is_whole() else None
    except (OSError, *PARSE_ERRORS):
        return None


def _metadata(fingerprint: str) -> dict[str, str]:
    return {"format": "lookonce-index", "format_version": str(FORMAT_VERSION), "fingerprint": fingerprint}


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
_SHARDS: TypeAdapter[list[ShardName]] = TypeAdapter(Annotated[list[ShardName], FailFast()])


def _joined(tables: list[Columns]) -> Columns:
    """The columns of all shards; of the images all rows sorted by key, each key once, from the last shard with it."""
    columns = {name: np.concatenate([EMPTY[name][:0], *(table[name] for table in tables)]) for name in EMPTY}
    words = columns["key"].view(">u8").astype(np.uint64)
    order = np.lexsort(words.T[::-1])  # stable: equal keys stay in the order of their shards
    words = words[order]
    is_last = np.ones(len(words), bool)
    is_last[:-1] = (words[1:] != words[:-1]).any(axis=1)
    kept = order[is_last]
    unique = {name: column if name in SHARD_COLUMNS else column[kept] for name, column in columns.items()}
    return unique | {"prefix": words[is_last, 0].copy()}


def _stamps(stat_of: dict[str, os.stat_result], shards: Sequence[str]) -> Columns:
    """Size and modification time of each shard's receipt, 0 where it is missing."""
    stats = [stat_of.get(shard) for shard in shards]
    return {
        "receipt_bytes": np.array([stat.st_size if stat else 0 for stat in stats], np.uint64),
        "receipt_time_ns": np.array([stat.st_mtime_ns if stat else 0 for stat in stats], np.int64),
    }


def file_stats(folder: Path, suffix: str) -> dict[str, os.stat_result]:
    """Stats of the files in a folder, by name without `suffix`, which they must have; none if the folder is missing."""
    stats = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(suffix):
                with contextlib.suppress(FileNotFoundError):  # removed after it was listed
                    stats[entry.name.removesuffix(suffix)] = entry.stat()
    return stats


class VisionCache:
    """The features of images by their keys.

        cache = VisionCache.open("caches/1f2e3d4c5b6a7980")
        features = cache[image_key(Path("a.jpg"))]      # [num_tokens, num_levels, hidden]
        several = cache.get_many(keys, pin=True)        # read in parallel, ready for .to("cuda", non_blocking=True)

    Safe to use from several threads, after a fork, and pickled to other processes.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint) -> None:
        """Use `VisionCache.open` or `find_cache`."""
        self.folder, self.fingerprint = folder, fingerprint
        self._open = lru_cache(NUM_OPEN)(_ShardFile)
        self.index = Index.open(folder, fingerprint.sha256)
        _check_sizes(folder, self.index)

    @classmethod
    def open(cls, folder: Path | str) -> VisionCache:
        """Open a cache folder, the one with `manifest.json` in it.

        Raises:
            CacheError: the folder is not a cache, or has a format version that this program does not read.
            CacheCorrupt: a shard is missing or differs in size from its receipt, or a receipt is damaged.
        """
        folder = Path(folder)
        return cls(folder, read_manifest(folder))

    @property
    def num_shards(self) -> int:
        return len(self.index.shards)

    @property
    def size_bytes(self) -> int:
        """The bytes of all shards."""
        return sum(self.index.shard_bytes.values())

    @property
    def encode_seconds(self) -> float:
        """Seconds that building the shards took, summed over all workers."""
        return float(self.index.columns["shard_seconds"].sum())

    @property
    def failed(self) -> dict[str, Failure]:
        """The images that could not be encoded, each with its reason, by image key."""
        return self.index.failed

    def keys(self) -> Iterator[str]:
        """The keys of all images, sorted."""
        return self.index.keys()

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, key: str) -> bool:
        return self.index.find(key) is not None

    def __getitem__(self, key: str) -> torch.Tensor:
        """The features of an image, `[num_tokens, num_levels, hidden]`, in the tower's dtype, on the CPU.

        Raises:
            FeaturesMissing: the cache does not have the image.
            CacheCorrupt: the bytes on disk are damaged.
        """
        return self._read(key, pin=False)

    def get_many(self, keys: Iterable[str], *, pin: bool = False) -> list[torch.Tensor]:
        """The features of several images, in the order of `keys`, read in parallel.

        `pin` reads into page-locked memory, from which copies to a GPU are asynchronous; without a GPU it does nothing.
        """
        return list(threaded_map(lambda key: self._read(key, pin), keys))

    def grid_thw(self, key: str) -> Grid:
        """The patch grid (t, h, w) of an image; it has t * h * w / merge_size**2 tokens."""
        return self.entry(key)[1].grid_thw

    def entry(self, key: str) -> tuple[str, Entry]:
        """The shard of an image, and its entry there; raises FeaturesMissing if the cache does not have the image."""
        row = self.index.find(key)
        if row is None:
            failure = self.failed.get(key)
            advice = f"it is quarantined: {failure.reason}" if failure else f"build the cache with: {BUILD_COMMAND}"
            raise FeaturesMissing(f"no features of image {key} in {self.folder}; {advice}")
        return self.index.entry(row)

    def _read(self, key: str, pin: bool) -> torch.Tensor:
        import torch

        pin = pin and torch.cuda.is_available()
        shard, entry = self.entry(key)
        num_bytes = entry.num_tokens * self.fingerprint.bytes_per_token
        if num_bytes != entry.size_bytes:
            raise self._corrupt(shard, key, f"have {entry.size_bytes:,} bytes in the receipt, expected {num_bytes:,}")
        if entry.offset + entry.size_bytes > self.index.shard_bytes[shard]:  # before memory is taken for them
            raise self._corrupt(shard, key, "are truncated")
        content = torch.empty(entry.size_bytes, dtype=torch.uint8, pin_memory=pin)
        buffer = raw_bytes(content)
        self._fill(buffer, shard, entry.offset, key)
        if xxhash.xxh3_64_hexdigest(buffer) != entry.xxh3_64:
            raise self._corrupt(shard, key, "do not match the checksum in the receipt")
        stored = self.fingerprint.tensors
        parts = torch.split(content, [entry.num_tokens * tensor.bytes_per_token for tensor in stored])
        tensors = (
            part.view(tensor.dtype).view(entry.num_tokens, *tensor.of_token)
            for part, tensor in zip(parts, stored, strict=True)
        )
        features = self.fingerprint.storage.dequantize(*tensors)
        return features.pin_memory() if pin else features  # returns itself if it is pinned

    def _fill(self, buffer: memoryview, shard: str, offset: int, key: str) -> None:
        filled = 0
        try:
            file = self._open(shard_path(self.folder, shard))
            while filled < len(buffer):
                num_read = os.preadv(file.descriptor, [buffer[filled:]], offset + filled)
                if num_read == 0:
                    raise self._corrupt(shard, key, "are truncated")
                filled += num_read
        except PermissionError as error:
            raise CacheError(explain_os_error(error)) from None
        except OSError as error:
            raise self._corrupt(shard, key, f"cannot be read ({error.strerror})") from None

    def _corrupt(self, shard: str, key: str, how: str) -> CacheCorrupt:
        """The error for an image, which names a file that has it by the plan."""
        named = key
        with contextlib.suppress(CacheError, OSError):  # a damaged plan must not hide the message
            named = f"{key} ({name})" if (name := read_plan(self.folder).names({key}).get(key)) else key
        path = shard_path(self.folder, shard)
        return CacheCorrupt(f"the features of image {named} in {path} {how}; run: {REPAIR_COMMAND}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_open"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._open = lru_cache(NUM_OPEN)(_ShardFile)

    def close(self) -> None:
        """Close the shard files; they are opened again when needed."""
        self._open.cache_clear()


class _ShardFile:
    """A shard file that stays open while there are references to this, so evicting it does not disturb a reader."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        try:  # at the end of a program modules such as contextlib are gone
            close(self.descriptor)
        except AttributeError:  # the file could not be opened
            pass


def find_cache(root: Path, fingerprint: Fingerprint) -> VisionCache:
    """Open the cache with this fingerprint below `root`.

    Raises:
        CacheMismatch: all caches below `root` have other fingerprints; the message names the fields that differ.
        CacheError: `root` has no caches.
    """
    problem = f"no cache in {located(root)} fits this model and these pixels"
    folder = root / fingerprint.folder_name
    if (folder / MANIFEST).exists():
        stored = read_manifest(folder)
        check_fingerprint(folder, stored, fingerprint)
        return VisionCache(folder, stored)
    fingerprints = []
    for path in sorted(root.glob(f"*/{MANIFEST}")):  # of any format version
        with contextlib.suppress(OSError, *PARSE_ERRORS):
            fingerprints.append(Fingerprint.from_json(read_json(path)["fingerprint"]))
    if fingerprints:
        raise CacheMismatch(mismatch_message(fingerprints, fingerprint, problem))
    raise CacheError(f"no cache in {located(root)}; build it with: {BUILD_COMMAND}")


def _check_sizes(folder: Path, index: Index) -> None:
    """Compare the size of each shard with its receipt: lists one folder and opens no shard."""
    stats = file_stats(folder / SHARDS, ".safetensors")
    for shard, receipt_bytes in index.shard_bytes.items():
        size = stats[shard].st_size if shard in stats else None
        if size != receipt_bytes:
            state = (
                "is missing" if size is None else f"has {size:,} bytes, expected {receipt_bytes:,} (from its receipt)"
            )
            raise CacheCorrupt(f"{shard_path(folder, shard)} {state}; run: {REPAIR_COMMAND}")
