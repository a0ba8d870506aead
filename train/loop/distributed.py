"""The ranks of a distributed training: one process per GPU, as torchrun starts them.

Design: every rank reads the same records and orders them in the same way, so only gradients are exchanged in training.
Only the first rank writes to the run folder and prints, and it broadcasts what it decides there. These messages are a
byte or a path and go through a gloo group on the CPU; over NCCL each one would be a host-device sync. They cost some
tenths of a millisecond per step.

A rank that has nothing left to do exits with code 0 even if the run fails: torchrun kills all ranks as soon as one
fails, and the first rank must still report the error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed
from transformers import TrainingArguments

from lookonce import environment

LONGEST_WAIT = timedelta(days=7)
"""How long a rank that has ended its part of an evaluation waits for the others."""
Found = TypeVar("Found")


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
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=arguments.ddp_timeout))
        return cls(arguments.process_index, arguments.world_size, group)

    @classmethod
    def join(cls) -> Ranks:
        """The ranks that torchrun has started, for work without Trainer; each gets its own GPU."""
        if environment.num_ranks() == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(environment.local_rank())
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

    def gather(self, mine: Found) -> list[Found] | None:
        """What each rank passes here, on the first rank; None on the others."""
        if self.num_ranks == 1:
            return [mine]
        of_all: list[Any] | None = [None] * self.num_ranks if self.is_first else None
        distributed.gather_object(mine, of_all, group=self.group)
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
        """Exit this process, which is not the first rank."""
        assert not self.is_first
        raise SystemExit(0)


ALONE = Ranks()
"""The only rank."""
