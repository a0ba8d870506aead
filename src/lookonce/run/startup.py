"""What a training does before its first step: each piece of work is named, timed and said as it happens.

Design: a line when a piece of work ends, with its seconds, so that a fast start is a few lines. One that takes longer
is also said before it ends, so that a slow start is never silent. It costs a sleeping thread each.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from lookonce.text import Notify, duration

PATIENCE_S = 3.0
"""Seconds after which a piece of work is said although it has not ended."""


class Startup:
    """Times named pieces of work; `notify` gets a note of each."""

    def __init__(self, notify: Notify, patience_s: float = PATIENCE_S) -> None:
        self.notify, self._patience_s = notify, patience_s
        self.seconds: dict[str, float] = {}
        """Seconds of all that has ended, by name, in order; the sum of those with one name."""

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block, whose name says what is done: "read records". Blocks must not contain each other."""
        said = threading.Timer(self._patience_s, self.notify, [f"{name} ..."])
        said.daemon = True
        said.start()
        began = time.perf_counter()
        try:
            yield
        finally:
            said.cancel()
        seconds = time.perf_counter() - began
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)
        self.notify(f"{name}: {duration(seconds)}")
