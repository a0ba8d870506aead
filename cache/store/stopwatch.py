"""Where the time of a build goes: seconds of each phase, on threads and on the GPU, which overlap.

Design: always on. A phase costs two clock readings an image or a forward; the GPU's own phases are timed by events,
which are read when asked for and never waited for in between.
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
    """Adds up seconds by phase; may be used from several threads."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block of this thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    @contextlib.contextmanager
    def device_phase(self, name: str, device: torch.device) -> Iterator[None]:
        """Time what a block gives the device to do, on its current stream."""
        if device.type != "cuda":
            with self.phase(name):
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
        """Busy seconds of each phase so far; waits for the device."""
        with self._lock:
            events, self._events = self._events, []
        for name, begin, end in events:
            end.synchronize()
            self.add(name, begin.elapsed_time(end) / 1000)
        return dict(self._seconds)
