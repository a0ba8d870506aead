"""Stop a training on a signal, with a checkpoint.

Design: on SIGUSR1 or SIGTERM the current step is finished and a checkpoint written: that takes seconds and may save an
hour of work. A validation that is due comes first. All ranks stop after the same step, whichever of them got the
signal: they exchange it after every step. Another signal more than `REPEAT_S` later ends the program at once; an
earlier one is taken for the same signal, which torchrun passes on to processes that Slurm has already signalled.
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
from lookonce.signals import handle_signals
from lookonce.train.loop.distributed import Ranks

REPEAT_S = 5.0
RESUME_HINT = "run the same command with --resume to continue"


class StopAfterStep(TrainerCallback):
    """Ends a training with a checkpoint after the step in which a signal came."""

    def __init__(self, ranks: Ranks) -> None:
        self.signal: signal.Signals | None = None
        """The first signal that came to this rank."""
        self._came = 0.0
        self._agreed = 0
        """The number of a signal that came to any rank; 0 if none did."""
        self._ranks = ranks
        self._has_begun = self._is_stopping = False

    @contextlib.contextmanager
    def recording_signals(self) -> Iterator[None]:
        """Record signals within the block."""
        with handle_signals(self._record):
            yield

    def _record(self, number: int, frame: FrameType | None) -> None:
        came, now = signal.Signals(number), time.monotonic()
        if not self._has_begun:
            raise Stopped(f"stopped by {came.name} before the first step; {RESUME_HINT}")
        if self.signal and now - self._came > REPEAT_S:
            raise Stopped(
                f"stopped by {came.name} before a checkpoint could be written; {RESUME_HINT} from the last one"
            )
        if not self.signal:
            self.signal, self._came = came, now

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._has_begun = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            return  # the training is finished
        self._agreed = self._agreed or self._ranks.largest(self.signal or 0)
        # Trainer would record a checkpoint that is not due, after the best step so far, as the best checkpoint. With
        # `train.best: exact_match` one is due wherever answers are.
        by_loss = args.load_best_model_at_end and args.metric_for_best_model == "loss"
        self._is_stopping = bool(self._agreed) and (control.should_save or not (control.should_evaluate and by_loss))
        if self._is_stopping:
            control.should_log = True
            control.should_save = not state.epoch.is_integer()  # at the end of an epoch a validation may come first

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or self._is_stopping

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_stopping:
            self._stop(state)

    def _stop(self, state: Any) -> None:
        self._ranks.wait()  # for the first rank's checkpoint
        self._ranks.disband()
        if not self._ranks.is_first:
            self._ranks.exit()
        raise Stopped(
            f"stopped by {signal.Signals(self._agreed).name} after step {state.global_step:,} of {state.max_steps:,}, "
            f"which is saved; {RESUME_HINT}"
        )
