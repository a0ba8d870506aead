"""Apply a function to many items on a few threads, which hides the latency of disks and networks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 8
"""For reading, hashing and checksums, which release Python's lock."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def threaded_map(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The result of `function` for each item, in order; at most about 2 * `NUM_THREADS` are computed ahead."""
    waiting: deque[Future[Result]] = deque()
    threads = ThreadPoolExecutor(NUM_THREADS)
    try:
        for item in items:
            waiting.append(threads.submit(function, item))
            if len(waiting) > 2 * NUM_THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        threads.shutdown(cancel_futures=True)
