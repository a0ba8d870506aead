"""Being told to stop: SIGTERM and SIGUSR1, which Slurm sends before a time limit or a preemption.

Design: SIGUSR1 is notice (`--signal=B:USR1@120`), so the shard in work is finished first; SIGTERM means that a kill
follows within seconds, so it is dropped; so does a second signal of either kind. Both end with exit code 75
(EX_TEMPFAIL): not done, run me again. Ctrl-C stays what it is.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lookonce.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def stopping_early() -> Iterator[None]:
    """While nothing is in work yet, or any more: a signal ends the program at once, with the same exit code."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}; the same command goes on")

    on_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, stop) for number in SIGNALS} if on_main_thread else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignals:
    """Notes the signals that ask to stop; a context manager that gives the handlers back."""

    def __init__(self) -> None:
        self.name = ""
        """Of the first signal that came."""
        self.finish_shard = True
        """Whether there is time to."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.finish_shard = not self.name and number == signal.SIGUSR1
        self.name = self.name or signal.Signals(number).name

    @property
    def now(self) -> bool:
        """Drop the shard in work."""
        return bool(self.name) and not self.finish_shard

    @property
    def soon(self) -> bool:
        """Begin no other shard."""
        return bool(self.name)
