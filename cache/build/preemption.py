"""A build that is told to stop.

Design: SIGUSR1 is notice (`--signal=B:USR1@120`), so the shard in work is finished first; SIGTERM means that a kill
follows within seconds, so it is dropped; so does a second signal of either kind.
"""

from __future__ import annotations

import signal
from types import FrameType

from lookonce.signals import handling


class StopSignals:
    """Notes the signals that ask to stop; a context manager that gives the handlers back."""

    def __init__(self) -> None:
        self.name = ""
        """Of the first signal that came."""
        self.finish_shard = True
        """Whether there is time to."""
        self._handling = handling(self._note)

    def __enter__(self) -> StopSignals:
        self._handling.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handling.__exit__(None, None, None)

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
