"""What a training does before its first step: each piece of work is timed, and reported when it ends.

A piece of work that takes longer is also named before it ends, by a sleeping thread. At the first step one line adds
all of it up, what no piece of work accounts for included.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import psutil

from lookonce.text import Notify, duration

PATIENCE_S = 3.0
"""Seconds after which a piece of work is named although it has not ended."""
OTHER = "other work"
"""The name of what no piece of work accounts for."""
SHORT_S = 0.1
"""Shorter pieces of work are not named in the line that adds up."""


class Startup:
    """Times named pieces of work; `notify` gets a note of each."""

    def __init__(self, notify: Notify, age_s: float = 0.0) -> None:
        """`age_s`: how long ago the start began."""
        self.notify = notify
        self._began, self._has_ended = time.perf_counter() - age_s, False
        self.seconds: dict[str, float] = {}
        """Seconds of all that has ended, by name, in order; the sum of those with one name."""

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block, whose name says what is done: "read records". Blocks must not contain each other.

        The note has all seconds with this name, as the line that adds up.
        """
        announcement = threading.Timer(PATIENCE_S, self.notify, [f"{name} ..."])
        announcement.daemon = True
        announcement.start()
        began = time.perf_counter()
        try:
            yield
        finally:
            announcement.cancel()
        seconds = time.perf_counter() - began
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)
        self.notify(f"{name}: {duration(self.seconds[name])}")

    def end(self) -> None:
        """Say what all seconds until now, when the first step begins, went to; later calls do nothing."""
        if self._has_ended:
            return
        self._has_ended, total = True, time.perf_counter() - self._began
        self.seconds[OTHER] = round(max(total - sum(self.seconds.values()), 0.0), 3)
        longest = sorted(self.seconds.items(), key=lambda part: -part[1])
        parts = ", ".join(f"{name} {duration(part)}" for name, part in longest if part >= SHORT_S)
        self.notify(f"first step after {duration(total)}{': ' if parts else ''}{parts}")


_began: float | None = None
"""When this process began the command that it runs now, by its monotonic clock; None if it runs only one."""


def begin_command(age_s: float = 0.0) -> None:
    """Note that this process, which runs several commands, has begun one some time ago."""
    global _began
    _began = time.monotonic() - age_s


def runs_several() -> bool:
    """Whether this process runs several commands, one after another."""
    return _began is not None


def process_age() -> float:
    """Seconds since this process was started, whatever the clock was set to meanwhile, to a hundredth on Linux; in a
    process of several commands, since the last of them began."""
    if _began is not None:
        return time.monotonic() - _began
    process = psutil.Process()
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME) - (process.create_time() - psutil.boot_time())
    return max(time.time() - process.create_time(), 0.0)
