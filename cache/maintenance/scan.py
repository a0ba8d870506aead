"""Check all shards of a cache, one after the other or on threads, with a progress bar.

Design: threads help only on a slow disk. On a fast one they wait for each other: a quick scan of 10,000 shards takes
three times as long with 8 threads as with one. So the first few shards decide.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from lookonce.cache.store.shards import SHARDS
from lookonce.threads import NUM_THREADS

NUM_TRIED, SLOW_S = 16, 1e-3
"""A disk is slow if the first `NUM_TRIED` shards took longer than `SLOW_S` each."""
Item = TypeVar("Item")
Result = TypeVar("Result")


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
