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
from lookonce.stop import handling
from lookonce.train.ranks import Ranks

REPEAT_S = 5.0
GO_ON = "the same command with --resume goes on"


class StopAfterStep(TrainerCallback):
    """Ends a training after the step in which a signal came, with a checkpoint."""

    def __init__(self, ranks: Ranks) -> None:
        self.name = ""
        """Of the first signal that came."""
        self._came = 0.0
        self._ranks = ranks
        self._is_in_step = False
        self._is_agreed = self._is_leaving = False

    @contextlib.contextmanager
    def heeding(self) -> Iterator[None]:
        """Note signals for as long as this lasts."""
        with handling(self._note):
            yield

    def _note(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if not self._is_in_step:
            raise Stopped(f"stopped by {name} before the first step; {GO_ON}")
        if self.name and now - self._came > REPEAT_S:
            raise Stopped(f"stopped by {name} before a checkpoint could be written; {GO_ON} from the last one")
        if not self.name:
            self.name, self._came = name, now

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._is_in_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            return  # the training ends in order
        self._is_agreed = self._is_agreed or self._ranks.any(bool(self.name))
        # a checkpoint that is not due, of the best step so far, would later be taken for the best that was saved
        is_free = control.should_save or not (control.should_evaluate and args.load_best_model_at_end)
        self._is_leaving = self._is_agreed and is_free
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
            f"stopped by {self.name or 'a signal to another process'} after step {state.global_step:,} of "
            f"{state.max_steps:,}, which is saved; {GO_ON}"
        )
