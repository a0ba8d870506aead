"""A training that is told to stop.

Design: SIGUSR1 and SIGTERM both let the step in work end and write a checkpoint, since that takes seconds and what it
saves may be an hour. A validation that is due comes first. All ranks stop after the same step, whichever of them was
told: they ask each other after every step. A signal that comes later than `REPEAT_S` after the first ends the program
at once; sooner it is the same one, which torchrun passes on to processes that Slurm has told already.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from lookonce.errors import Stopped
from lookonce.signals import handling
from lookonce.train.loop.distributed import Ranks

REPEAT_S = 5.0
GO_ON = "the same command with --resume goes on"


class StopAfterStep(TrainerCallback):
    """Ends a training after the step in which a signal came, with a checkpoint."""

    def __init__(self, ranks: Ranks) -> None:
        self.signal: signal.Signals | None = None
        """The first that came to this rank."""
        self._came = 0.0
        self._agreed = 0
        """The number of one that came to any."""
        self._ranks = ranks
        self._is_in_step = self._is_leaving = False

    @contextlib.contextmanager
    def heeding(self) -> Iterator[None]:
        """Note signals for as long as this lasts."""
        with handling(self._note):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        came, now = signal.Signals(number), time.monotonic()
        if not self._is_in_step:
            raise Stopped(f"stopped by {came.name} before the first step; {GO_ON}")
        if self.signal and now - self._came > REPEAT_S:
            raise Stopped(f"stopped by {came.name} before a checkpoint could be written; {GO_ON} from the last one")
        if not self.signal:
            self.signal, self._came = came, now

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_in_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            return  # the training ends in order
        self._agreed = self._agreed or self._ranks.largest(self.signal or 0)
        # a checkpoint that is not due, of the best step so far, would later be taken for the best that was saved
        is_free = control.should_save or not (control.should_evaluate and args.load_best_model_at_end)
        self._is_leaving = bool(self._agreed) and is_free
        if self._is_leaving:
            control.should_log = True
            control.should_save = not state.epoch.is_integer()  # an epoch's end may have to validate first

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or self._is_leaving

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_leaving:
            self._leave(state)

    def _leave(self, state: Any) -> None:
        self._ranks.wait()  # until the first has written its checkpoint, and before it says so
        self._ranks.part()
        if not self._ranks.is_first:
            self._ranks.leave()
        raise Stopped(
            f"stopped by {signal.Signals(self._agreed).name} after step {state.global_step:,} of {state.max_steps:,}, "
            f"which is saved; {GO_ON}"
        )
