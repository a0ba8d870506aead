"""Being told to stop: SIGTERM and SIGUSR1, which Slurm sends before a time limit or a preemption.

Both phases end with exit code 75 (EX_TEMPFAIL): not done, run me again. What each of them finishes first is its own
affair (cache/build/preemption.py, train/loop/preemption.py). Ctrl-C stays what it is.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from lookonce.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Give these signals to `handler` for as long as this lasts; only on the main thread, which alone may ask."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in SIGNALS} if on_main_thread else {}
    try:
        yield
    finally:
        for number, its_handler in before.items():
            signal.signal(number, its_handler)


@contextlib.contextmanager
def stopping_early(advice: str = "the same command goes on") -> Iterator[None]:
    """While nothing is in work yet, or any more: a signal ends the program at once, with the same exit code."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}; {advice}")

    with handling(stop):
        yield
