"""How fast features are read, beside the speed of the disk: the measurements behind `lookonce bench read`.

The same files are read twice: in order in large blocks, which is the disk's speed, and image by image in random order
through `VisionCache.get_many`, with checksums. Before each, the kernel is asked to drop the files from the page cache
(`posix_fadvise`, which needs no privileges; it has no effect on a file system in memory).
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lookonce.cache.format import BUILD_COMMAND
from lookonce.cache.store.fingerprint import raw_bytes
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.errors import FeaturesMissing
from lookonce.text import count, rows, size, table
from lookonce.threads import NUM_THREADS

BLOCK_BYTES = 1 << 24
IMAGES_PER_CALL = 32


@dataclass(frozen=True)
class ReadBench:
    """What was measured."""

    num_images: int
    num_bytes: int
    """Bytes of features that were read in random order."""
    sequential_bytes: int
    sequential_seconds: float
    random_seconds: float
    open_seconds: float
    check: bool

    @property
    def share(self) -> float:
        """The rate of random reads divided by that of sequential reads."""
        return (self.num_bytes / self.random_seconds) / (self.sequential_bytes / self.sequential_seconds)

    def text(self) -> str:
        checked = "checked" if self.check else "not checked"
        measured = (
            ("files in order, in large blocks", self.sequential_bytes, self.sequential_seconds),
            (f"images in random order, {checked}", self.num_bytes, self.random_seconds),
        )
        lines = [(name, f"{number / seconds / 1e9:.2f}", f"{seconds:.2f}") for name, number, seconds in measured]
        facts = [
            ("read", f"{count(self.num_images, 'image')}, {size(self.num_bytes)}, with {NUM_THREADS} threads"),
            (
                "random",
                f"{self.share:.0%} of the sequential rate; files were dropped from the page cache before each",
            ),
            ("opening", f"{self.open_seconds * 1000:.0f} ms"),
        ]
        return "\n\n".join([table(("", "GB/s", "seconds"), lines), rows(facts)])


def bench_read(folder: Path, num_images: int, *, check: bool = True, seed: int = 0) -> ReadBench:
    """Read some images in random order, and their shards in order.

    Raises:
        CacheError: the cache cannot be opened or is damaged.
    """
    start = time.perf_counter()
    cache = VisionCache.open(folder, check=check)
    open_seconds = time.perf_counter() - start
    keys = list(cache.keys())
    if not keys:
        raise FeaturesMissing(f"{folder} holds no features to read; encode some with: {BUILD_COMMAND}")
    random.Random(seed).shuffle(keys)
    keys = keys[:num_images]
    entries = [cache.entry(key) for key in keys]
    files = [shard_path(folder, shard) for shard in sorted({shard for shard, _ in entries})]
    cache.get_many(keys[:IMAGES_PER_CALL], pin=True)  # allocating pinned memory is slow the first time
    _drop_from_page_cache(files)
    sequential_seconds = _read_in_order(files)
    _drop_from_page_cache(files)
    start = time.perf_counter()
    for begin in range(0, len(keys), IMAGES_PER_CALL):
        cache.get_many(keys[begin : begin + IMAGES_PER_CALL], pin=True)
    random_seconds = time.perf_counter() - start
    return ReadBench(
        num_images=len(keys),
        num_bytes=sum(entry.size_bytes for _, entry in entries),
        sequential_bytes=sum(path.stat().st_size for path in files),
        sequential_seconds=sequential_seconds,
        random_seconds=random_seconds,
        open_seconds=open_seconds,
        check=check,
    )


def _read_in_order(files: list[Path]) -> float:
    """Seconds to read whole files, block after block, each file by one thread."""
    pin = torch.cuda.is_available()
    buffers = [raw_bytes(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pin)) for _ in files[:NUM_THREADS]]

    def read(path: Path) -> None:
        buffer = buffers.pop()
        descriptor = os.open(path, os.O_RDONLY)
        offset = 0
        while num_read := os.preadv(descriptor, [buffer], offset):
            offset += num_read
        os.close(descriptor)
        buffers.append(buffer)

    start = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(read, files))
    return time.perf_counter() - start


def _drop_from_page_cache(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
