"""How fast features are read, beside what the disk gives: the measurements behind `lookonce bench read`.

The same files twice in one run: large blocks one after the other, as fast as the disk gives them, and whole images in
random order through `VisionCache.get_many`, each checked. Before each the kernel is asked to forget the files
(`posix_fadvise`, which needs no rights; it does nothing on a file system that lives in memory).
"""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lookonce.cache.constants import BUILD_COMMAND
from lookonce.cache.store.fingerprint import raw_bytes
from lookonce.cache.store.reader import NUM_READERS, VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.errors import FeaturesMissing
from lookonce.text import count, rows, size, table

BLOCK_BYTES = 1 << 24
IMAGES_A_CALL = 32


@dataclass(frozen=True)
class ReadBench:
    """What was measured."""

    num_images: int
    num_bytes: int
    """Of features, in random order."""
    sequential_bytes: int
    sequential_seconds: float
    random_seconds: float
    open_seconds: float
    check: bool

    @property
    def share(self) -> float:
        """The rate of random reads over that of sequential ones."""
        return (self.num_bytes / self.random_seconds) / (self.sequential_bytes / self.sequential_seconds)

    def text(self) -> str:
        checked = "checked" if self.check else "not checked"
        ways = (
            ("large blocks, in order", self.sequential_bytes, self.sequential_seconds),
            (f"whole images, at random, {checked}", self.num_bytes, self.random_seconds),
        )
        lines = [(name, f"{number / seconds / 1e9:.2f}", f"{seconds:.2f}") for name, number, seconds in ways]
        facts = [
            ("read", f"{count(self.num_images, 'image')}, {size(self.num_bytes)}, with {NUM_READERS} threads each way"),
            ("random", f"{self.share:.0%} of the sequential rate; the kernel was told to forget the files before each"),
            ("opening", f"{self.open_seconds * 1000:.0f} ms"),
        ]
        return "\n\n".join([table(("", "GB/s", "seconds"), lines), rows(facts)])


def bench_read(folder: Path, num_images: int, *, check: bool = True, seed: int = 0) -> ReadBench:
    """Read a cache both ways.

    Raises:
        CacheError: it can not be opened, or is not what was written.
    """
    start = time.perf_counter()
    cache = VisionCache.open(folder, check=check)
    open_seconds = time.perf_counter() - start
    keys = list(cache.keys())
    if not keys:
        raise FeaturesMissing(f"{folder} holds no features to read; make them with: {BUILD_COMMAND}")
    random.Random(seed).shuffle(keys)
    keys = keys[:num_images]
    places = [cache.entry(key) for key in keys]
    files = [shard_path(folder, shard) for shard in sorted({shard for shard, _ in places})]
    cache.get_many(keys[:IMAGES_A_CALL], pin=True)  # pinned memory is slow to get the first time
    _forget(files)
    sequential_seconds = _read_in_order(files)
    _forget(files)
    start = time.perf_counter()
    for begin in range(0, len(keys), IMAGES_A_CALL):
        cache.get_many(keys[begin : begin + IMAGES_A_CALL], pin=True)
    random_seconds = time.perf_counter() - start
    return ReadBench(
        num_images=len(keys),
        num_bytes=sum(entry.size_bytes for _, entry in places),
        sequential_bytes=sum(path.stat().st_size for path in files),
        sequential_seconds=sequential_seconds,
        random_seconds=random_seconds,
        open_seconds=open_seconds,
        check=check,
    )


def _read_in_order(files: list[Path]) -> float:
    """Seconds to read whole files, block after block, each file by one thread."""
    pin = torch.cuda.is_available()
    buffers = [raw_bytes(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pin)) for _ in files[:NUM_READERS]]

    def read(path: Path) -> None:
        buffer = buffers.pop()
        descriptor = os.open(path, os.O_RDONLY)
        offset = 0
        while num_read := os.preadv(descriptor, [buffer], offset):
            offset += num_read
        os.close(descriptor)
        buffers.append(buffer)

    start = time.perf_counter()
    with ThreadPoolExecutor(NUM_READERS) as threads:
        list(threads.map(read, files))
    return time.perf_counter() - start


def _forget(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
