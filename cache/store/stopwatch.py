"""Seconds of a build by operation, on threads and on the GPU; operations overlap.

Design: always on. A measurement costs two clock readings per image or tower batch. GPU operations are timed by events
that are read only when the sums are asked for, so measuring causes no host-device sync.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Stopwatch:
    """Sums up seconds by operation; may be used from several threads."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure a block of this thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    @contextlib.contextmanager
    def measure_device(self, name: str, device: torch.device) -> Iterator[None]:
        """Measure what a block launches on the device's current stream."""
        if device.type != "cuda":
            with self.measure(name):
                yield
            return
        import torch

        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        yield
        end.record()
        with self._lock:
            self._events.append((name, begin, end))

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] += seconds

    def seconds(self) -> dict[str, float]:
        """Seconds of each operation so far; waits for the device."""
        with self._lock:
            events, self._events = self._events, []
        for name, begin, end in events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) / 1000)
        return dict(self._seconds)
