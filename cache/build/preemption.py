"""Signals that ask a build to stop.

Design: SIGUSR1 announces a stop (`--signal=B:USR1@120`), so the current shard is finished first. SIGTERM means that a
kill follows within seconds, so the current shard is dropped. A second signal of either kind drops it too.
"""

from __future__ import annotations

import signal
from types import FrameType

from lookonce.signals import handle_signals


class StopSignals:
    """Records the signals that ask to stop; a context manager that restores the previous handlers."""

    def __init__(self) -> None:
        self.name = ""
        """Name of the first signal; empty if none came."""
        self._finish_shard = True
        self._handling = handle_signals(self._record)

    def __enter__(self) -> StopSignals:
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._finish_shard = not self.name and number == signal.SIGUSR1
        self.name = self.name or signal.Signals(number).name

    @property
    def now(self) -> bool:
        """Whether to drop the current shard."""
        return bool(self.name) and not self._finish_shard

    @property
    def soon(self) -> bool:
        """Whether to start no further shard."""
        return bool(self.name)
