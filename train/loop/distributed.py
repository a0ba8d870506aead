"""The ranks of a distributed training, one process per GPU, as torchrun starts them; and how all stop after a signal.

Every rank reads the same records and orders them in the same way. Only the first rank writes to the run folder and
prints, and it broadcasts what it decides there, through a gloo group on the CPU: over NCCL each message would be a
host-device sync. A rank that has nothing left to do exits with code 0 even if the run fails: torchrun kills all ranks
as soon as one fails, and the first rank must still report the error.

On SIGUSR1 or SIGTERM the current step is finished and a checkpoint written, after a validation that is due. Ranks
exchange signals after every step, so all stop after the same one. Another signal more than `REPEAT_S` later ends the
program at once; an earlier one is taken for the same signal, which torchrun passes on to processes that Slurm has
already signalled.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed
from transformers import TrainerCallback, TrainingArguments

from lookonce import environment
from lookonce.errors import Stopped
from lookonce.signals import waiting_for_processes

LONGEST_WAIT = timedelta(days=7)
"""How long a rank that has ended its part of an evaluation waits for the others."""
Found = TypeVar("Found")
REPEAT_S = 5.0
RESUME_HINT = "run the same command with --resume to continue"


@dataclass(frozen=True)
class Ranks:
    """This process's rank, and decisions that all ranks share."""

    rank: int = 0
    num_ranks: int = 1
    group: Any = None

    @classmethod
    def of(cls, arguments: TrainingArguments) -> Ranks:
        """The ranks of the process group that Trainer has joined."""
        if arguments.world_size == 1:
            return cls()
        with waiting_for_processes():
            group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=arguments.ddp_timeout))
        return cls(arguments.process_index, arguments.world_size, group)

    @classmethod
    def join(cls) -> Ranks:
        """The ranks that torchrun has started, for work without Trainer; each gets its own GPU."""
        if environment.num_ranks() == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(environment.local_rank())
        with waiting_for_processes():
            distributed.init_process_group("gloo", timeout=LONGEST_WAIT)
        return cls(environment.rank(), environment.num_ranks(), distributed.group.WORLD)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first_decides(self, decide: Callable[[], Found]) -> Found:
        """The first rank's result, on all ranks; if it raises, it reports the error and the other ranks exit."""
        if self.num_ranks == 1:
            return decide()
        message: list[Any] = [False, None]
        try:
            if self.is_first:
                message = [True, decide()]
        finally:
            distributed.broadcast_object_list(message, src=0, group=self.group)
        succeeded, found = message
        if not succeeded:
            self.exit()
        return found  # type: ignore[no-any-return]

    def largest(self, number: int) -> int:
        """The largest of the numbers that the ranks pass here, on all ranks."""
        if self.num_ranks == 1:
            return number
        numbers = torch.tensor(number)
        distributed.all_reduce(numbers, distributed.ReduceOp.MAX, group=self.group)
        return int(numbers)

    def gather_for_all(self, mine: Found) -> list[Found]:
        """What each rank passes here, on all ranks."""
        of_all: list[Any] = [mine] * self.num_ranks
        if self.num_ranks > 1:
            distributed.all_gather_object(of_all, mine, group=self.group)
        return of_all

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.num_ranks > 1:
            distributed.barrier(group=self.group)

    def disband(self) -> None:
        """End communication between ranks, so that the first may continue alone for any time."""
        if self.num_ranks > 1:
            distributed.destroy_process_group()

    def exit(self) -> NoReturn:
        assert not self.is_first
        raise SystemExit(0)


ALONE = Ranks()


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

    def record(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
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
        # `train.best: metric` one is due wherever answers are.
        by_loss = args.load_best_model_at_end and args.metric_for_best_model == "loss"
        self._is_stopping = bool(self._agreed) and (control.should_save or not (control.should_evaluate and by_loss))
        if self._is_stopping:
            control.should_log = True
            control.should_save = not state.epoch.is_integer()  # at the end of an epoch a validation may come first

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_save or self._is_stopping

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._is_stopping:
            return
        self._ranks.wait()  # for the first rank's checkpoint
        self._ranks.disband()
        if not self._ranks.is_first:
            self._ranks.exit()
        raise Stopped(
            f"stopped by {signal.Signals(self._agreed).name} after step {state.global_step:,} of {state.max_steps:,}, "
            f"which is saved; {RESUME_HINT}"
        )
