"""Apply a function to many items on a few threads, which hides the latency of disks and networks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

NUM_THREADS = 8
"""For reading, hashing and checksums, which release Python's lock."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def threaded_map(
    function: Callable[[Item], Result], items: Iterable[Item], stop: threading.Event | None = None
) -> Iterator[Result]:
    """The result of `function` for each item, in order; at most about 2 * `NUM_THREADS` are computed ahead.

    `stop` is set after a failure or Ctrl-C, before running calls are waited for, so that `function` can end them early.
    """
    waiting: deque[Future[Result]] = deque()
    threads = ThreadPoolExecutor(NUM_THREADS)
    try:
        for item in items:
            waiting.append(threads.submit(function, item))
            if len(waiting) > 2 * NUM_THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BaseException:
        if stop:
            stop.set()
        raise
    finally:
        threads.shutdown(cancel_futures=True)
