"""Signals that ask a process to stop: SIGTERM and SIGUSR1, which Slurm sends before a time limit or a preemption.

Both phases then end with exit code 75 (EX_TEMPFAIL): not finished, run me again. What each finishes first is in
cache/build/preemption.py and train/loop/preemption.py. Ctrl-C keeps its usual meaning.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from lookonce.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
RESUME = "run the same command again to resume"
Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def handle_signals(handler: Handler) -> Iterator[None]:
    """Call `handler` for these signals within the block. Does nothing outside the main thread, as Python requires."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in SIGNALS} if on_main_thread else {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def exit_on_signal(advice: str = RESUME) -> Iterator[None]:
    """End the program at once on a signal, with the same exit code: for blocks with nothing to finish first."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}; {advice}")

    with handle_signals(stop):
        yield
