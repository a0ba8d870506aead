"""Compare shards with their receipts, for verify, repair and stage: one, or all of a cache with a progress bar.

Design: a shard is a header followed by images without gaps, and its receipt has a checksum of each. So every byte of
the file is covered by exactly one checksum, and a flipped bit is traced to its image. Files are read with `pread` in
blocks: memory is bounded whatever the size of an image, and network filesystems are fastest with large requests.

Threads help only on a slow disk. On a fast one they wait for each other: a quick scan of 10,000 shards takes three
times as long with 8 threads as with one. So the first few shards decide.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import xxhash
from tqdm import tqdm

from lookonce.cache.format import MAX_HEADER_BYTES, PARSE_ERRORS
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import Receipt
from lookonce.cache.store.shards import FORMAT_NAME, SHARDS, shard_path
from lookonce.files import parse_json
from lookonce.text import shown, size
from lookonce.threads import NUM_THREADS

BLOCK_BYTES = 8 << 20
Part = Literal["manifest", "plan", "receipt", "shard", "header", "image"]
OnBlock = Callable[[memoryview, int], object]
"""Is called with each block that was read and its offset; may raise to end the reading."""
NUM_TRIED, SLOW_S = 16, 1e-3
"""A disk is slow if the first `NUM_TRIED` shards took longer than `SLOW_S` each."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def ignore(block: memoryview, offset: int) -> None:
    """Do nothing with a block."""


@dataclass(frozen=True)
class Problem:
    """Something in a cache that differs from what was written."""

    shard: str
    """The shard's name; empty if the problem is not in a shard."""
    image: str
    """The image's key; empty if the problem is not in one image."""
    what: str
    part: Part
    file: str = ""
    """The image's file, if the plan names one."""

    def text(self) -> str:
        file = f" ({self.file})" if self.file else ""
        where = [self.shard, f"image {self.image}{file}" if self.image else ""]
        return ": ".join([*(name for name in where if name), self.what])


def without_advice(error: Exception) -> str:
    """The message of an error without the advice that follows its semicolon."""
    return str(error).partition(";")[0]


@dataclass(frozen=True)
class Region:
    """Bytes of a shard with their own checksum: the header or an image."""

    key: str
    """The image's key; empty for the header."""
    offset: int
    size_bytes: int
    xxh3_64: str


def regions(receipt: Receipt) -> list[Region]:
    """The header and then the images, in their order in the file."""
    entries = sorted(receipt.images.items(), key=lambda item: item[1].offset)
    images = [Region(key, entry.offset, entry.size_bytes, entry.xxh3_64) for key, entry in entries]
    return [Region("", 0, receipt.header_bytes, receipt.header_xxh3_64), *images]


class Unreadable(OSError):
    """A block of a shard cannot be read."""


def checksum(descriptor: int, region: Region, on_block: OnBlock = ignore) -> str:
    """The xxh3_64 of the bytes in a region, as far as the file reaches.

    Raises:
        Unreadable: they cannot be read.
    """
    digest = xxhash.xxh3_64()
    offset, end = region.offset, region.offset + region.size_bytes
    while offset < end and (block := _read(descriptor, min(BLOCK_BYTES, end - offset), offset)):
        digest.update(block)
        on_block(memoryview(block), offset)
        offset += len(block)
    return digest.hexdigest()


def _read(descriptor: int, num_bytes: int, offset: int) -> bytes:
    try:
        return os.pread(descriptor, num_bytes, offset)
    except OSError as error:
        raise Unreadable(error.errno, error.strerror) from None
    except OverflowError:
        raise Unreadable(errno.EOVERFLOW, os.strerror(errno.EOVERFLOW)) from None


def check_shard(
    folder: Path, receipt: Receipt, fingerprint: Fingerprint | None, *, every_byte: bool, on_block: OnBlock
) -> list[Problem]:
    """Problems of a shard: its presence, size and header; with `every_byte` also its images and the header's content.

    Without a fingerprint, because the manifest is broken, the header's content is not compared.
    """
    path = shard_path(folder, receipt.shard)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        what = f"{path} is missing" if missing else f"cannot read {path}: {error.strerror}"
        return [Problem(receipt.shard, "", what, "shard")]
    try:
        return list(_check_open_shard(descriptor, receipt, fingerprint, every_byte, on_block))
    finally:
        os.close(descriptor)


def _check_open_shard(
    descriptor: int, receipt: Receipt, fingerprint: Fingerprint | None, every_byte: bool, on_block: OnBlock
) -> Iterator[Problem]:
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes != receipt.size_bytes:
        what = f"the shard has {size_bytes:,} bytes, its receipt says {receipt.size_bytes:,}"
        yield Problem(receipt.shard, "", what, "shard")
    header, *images = regions(receipt)
    broken = _check_region(descriptor, receipt, header, on_block)
    yield from broken
    if every_byte:
        for image in images:
            yield from _check_region(descriptor, receipt, image, on_block)
        yield from check_offsets(receipt)
        if fingerprint and not broken:
            content = os.pread(descriptor, min(header.size_bytes, MAX_HEADER_BYTES), 0)
            yield from check_header(content, receipt, fingerprint)


def _check_region(descriptor: int, receipt: Receipt, region: Region, on_block: OnBlock) -> list[Problem]:
    try:
        if checksum(descriptor, region, on_block) == region.xxh3_64:
            return []
        what = "do not have the checksum of the receipt"
    except Unreadable as error:  # not OSError, which `on_block` may raise
        what = f"cannot be read: {error.strerror}"
    if region.key:
        return [Problem(receipt.shard, region.key, f"its bytes {what}", "image")]
    return [Problem(receipt.shard, "", f"the bytes of its header {what}", "header")]


def check_offsets(receipt: Receipt) -> Iterator[Problem]:
    """Gaps and overlaps between the images of a receipt."""
    end = receipt.header_bytes
    for region in regions(receipt)[1:]:
        if region.offset != end:
            how = "leave a gap" if region.offset > end else "overlap"
            what = f"its offset in the receipt is {region.offset:,} and should be {end:,}: images {how}"
            yield Problem(receipt.shard, region.key, what, "receipt")
        end = region.offset + region.size_bytes
    if end != receipt.size_bytes:
        what = f"the images in the receipt end at {end:,}, the shard at {receipt.size_bytes:,}"
        yield Problem(receipt.shard, "", what, "receipt")


def check_header(content: bytes, receipt: Receipt, fingerprint: Fingerprint) -> Iterator[Problem]:
    """Differences between the safetensors header of a shard, as bytes, and its receipt."""
    try:
        found, metadata, _ = parse_header(content)
    except ValueError as error:
        yield Problem(receipt.shard, "", f"the header {error}", "header")
        return
    if metadata.get("fingerprint") != receipt.fingerprint:
        yield Problem(receipt.shard, "", "the header and the receipt have different fingerprints", "header")
    expected = expected_tensors(receipt, fingerprint)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            what = f"the header says {found.get(name)}, the receipt {expected.get(name)}"
            yield Problem(receipt.shard, name.partition(".")[0], what, "header")
    grids = {key: list(entry.grid_thw) for key, entry in receipt.images.items()}
    if metadata["grid_thw"] != grids:
        yield Problem(receipt.shard, "", "the header and the receipt have different patch grids", "header")


def expected_tensors(receipt: Receipt, fingerprint: Fingerprint) -> dict[str, Any]:
    """The tensors of a shard as its safetensors header should describe them."""
    described: dict[str, Any] = {}
    for key, entry in receipt.images.items():
        begin = entry.offset - receipt.header_bytes
        for tensor in fingerprint.tensors:
            end = begin + entry.num_tokens * tensor.bytes_per_token
            shape = [entry.num_tokens, *tensor.of_token]
            described[key + tensor.suffix] = {"dtype": tensor.code, "shape": shape, "data_offsets": [begin, end]}
            begin = end
    return described


def parse_header(content: bytes) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Tensors and metadata (with parsed patch grids) from the first bytes of a shard, and the offset of its features.

    Raises:
        ValueError: the bytes are not the header of a shard; the message says why.
    """
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        raise ValueError(f"claims {size(length)}, more than the file has")
    try:
        described = parse_json(content[8 : 8 + length])
        metadata = described.pop("__metadata__")
        metadata["grid_thw"] = parse_json(metadata["grid_thw"])
        name = metadata["format"]
    except PARSE_ERRORS as error:
        raise ValueError(f"cannot be parsed ({shown(repr(error))})") from None
    if name != FORMAT_NAME:
        raise ValueError(f"is of the format {name!r}, not {FORMAT_NAME!r}")
    return described, metadata, 8 + length


class StoppableThreads:
    """Threads that stop at their next block after a failure or Ctrl-C, instead of reading their shards to the end."""

    def __init__(self) -> None:
        self._is_stopped = False

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """The result of `function` for each item, in order."""
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            try:
                yield from threads.map(function, items)
            except BaseException:
                self._is_stopped = True
                raise

    def check(self) -> None:
        """Raise InterruptedError if the threads should stop; `function` must call this for each block."""
        if self._is_stopped:
            raise InterruptedError


class Scan:
    """A scan of some shards; a context manager. The progress bar counts bytes with `every_byte`, or else shards."""

    def __init__(self, folder: Path, names: Sequence[str], *, every_byte: bool) -> None:
        self.num_bytes = 0
        self._names, self._every_byte = names, every_byte
        self._threads = StoppableThreads()
        self._lock = threading.Lock()
        total = sum(_sizes(folder)) if every_byte else len(names)
        unit: dict[str, Any] = {"unit": "B", "unit_scale": True} if every_byte else {"unit": "shard"}
        desc = f"verify, {'full' if every_byte else 'quick'}"
        self._bar = tqdm(total=total, desc=desc, leave=False, disable=None, **unit)

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def each(self, check: Callable[[str], Result]) -> Iterator[Result]:
        """The result of `check` for each shard name, in order. It may be called from several threads."""
        start, num_tried = time.perf_counter(), 0
        while not self._every_byte and num_tried < min(NUM_TRIED, len(self._names)):
            yield self._check(check, self._names[num_tried])
            num_tried += 1
        rest = self._names[num_tried:]
        is_fast = not self._every_byte and time.perf_counter() - start < num_tried * SLOW_S
        apply = map if is_fast else self._threads.map
        yield from apply(lambda name: self._check(check, name), rest)

    def count_block(self, block: memoryview, offset: int) -> None:
        """Count a block that was read; ends the thread if the scan has ended."""
        self._threads.check()
        with self._lock:
            self.num_bytes += len(block)
            if self._every_byte:
                self._bar.update(len(block))

    def _check(self, check: Callable[[str], Result], name: str) -> Result:
        result = check(name)
        if not self._every_byte:
            with self._lock:
                self._bar.update()
        return result


def _sizes(folder: Path) -> Iterator[int]:
    try:
        yield from (entry.stat().st_size for entry in os.scandir(folder / SHARDS))
    except FileNotFoundError:
        return
