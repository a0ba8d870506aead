"""All shards of a cache looked at, one after the other or on threads, under a progress bar.

Design: threads where the disk makes one wait. For a quick look at a disk that answers at once they would only wait for
each other: 10,000 shards take three times as long with 8 of them as with one. So the first few shards tell which it is.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from lookonce.cache.maintenance.checks import NUM_THREADS
from lookonce.cache.store.shards import SHARDS

NUM_TRIED, SLOW_S = 16, 1e-3
"""A disk is slow if the first few shards took longer than this to look at."""
T = TypeVar("T")


class Walk:
    """A walk over some shards; a context manager. The bar counts bytes if `every_byte` is read, or else shards."""

    def __init__(self, folder: Path, names: Sequence[str], *, every_byte: bool) -> None:
        self.num_bytes = 0
        self._names, self._every_byte = names, every_byte
        self._ended = False
        self._lock = threading.Lock()
        total = sum(_sizes(folder)) if every_byte else len(names)
        unit: dict[str, Any] = {"unit": "B", "unit_scale": True} if every_byte else {"unit": "shard"}
        desc = f"verify, {'full' if every_byte else 'quick'}"
        self._bar = tqdm(total=total, desc=desc, leave=False, disable=None, **unit)

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def each(self, check: Callable[[str], T]) -> Iterator[T]:
        """What `check` finds of each shard, in order. It may be called from several threads."""
        start, num_tried = time.perf_counter(), 0
        while not self._every_byte and num_tried < min(NUM_TRIED, len(self._names)):
            yield self._look(check, self._names[num_tried])
            num_tried += 1
        rest = self._names[num_tried:]
        if not self._every_byte and time.perf_counter() - start < num_tried * SLOW_S:
            yield from (self._look(check, name) for name in rest)
            return
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            try:
                yield from threads.map(lambda name: self._look(check, name), rest)
            except BaseException:
                self._ended = True  # else Ctrl-C would wait until the shards in hand are read
                raise

    def count(self, piece: memoryview, offset: int) -> None:
        """Count a piece that was read; ends the thread that read it if the walk has ended."""
        if self._ended:
            raise InterruptedError
        with self._lock:
            self.num_bytes += len(piece)
            if self._every_byte:
                self._bar.update(len(piece))

    def _look(self, check: Callable[[str], T], name: str) -> T:
        found = check(name)
        if not self._every_byte:
            with self._lock:
                self._bar.update()
        return found


def _sizes(folder: Path) -> Iterator[int]:
    try:
        yield from (entry.stat().st_size for entry in os.scandir(folder / SHARDS))
    except FileNotFoundError:
        return
