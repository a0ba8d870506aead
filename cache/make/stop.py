"""Being told to stop: SIGTERM and SIGUSR1, which Slurm sends before a time limit or a preemption.

Design: SIGUSR1 is notice (`--signal=B:USR1@120`), so the shard in work is finished first; SIGTERM means that a kill
follows within seconds, so it is dropped; so does a second signal of either kind. Both end with exit code 75
(EX_TEMPFAIL): not done, run me again. Ctrl-C stays what it is.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


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
