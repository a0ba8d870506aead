"""The processes that train together, one a GPU, as torchrun starts them.

Design: every rank reads the same records and makes the same order of them, so nothing but gradients is exchanged in
training. Only the first rank writes to the run's folder and talks, and what it finds there it tells the others. They
agree through a gloo group, on the CPU: what they say to each other is a byte or a path, and over NCCL each word would
make the program wait for its GPU. It costs some tenths of a millisecond a step.

A rank that has nothing more to say ends with exit code 0, whatever has become of the run: torchrun kills all others as
soon as one fails, and that would be the first, which is about to say why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed
from transformers import TrainingArguments

Found = TypeVar("Found")


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is, and what they agree on."""

    rank: int = 0
    number: int = 1
    group: Any = None

    @classmethod
    def of(cls, arguments: TrainingArguments) -> Ranks:
        """Those that Trainer has joined."""
        if arguments.world_size == 1:
            return cls()
        group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=arguments.ddp_timeout))
        return cls(arguments.process_index, arguments.world_size, group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first_decides(self, decide: Callable[[], Found]) -> Found:
        """What the first rank finds, on all ranks; if it finds an error, the others leave it to say so."""
        if self.number == 1:
            return decide()
        told: list[Any] = [False, None]
        try:
            if self.is_first:
                told = [True, decide()]
        finally:
            distributed.broadcast_object_list(told, src=0, group=self.group)
        has_found, found = told
        if not has_found:
            self.leave()
        return found  # type: ignore[no-any-return]

    def largest(self, number: int) -> int:
        """Of the numbers that the ranks give here, on all of them."""
        if self.number == 1:
            return number
        numbers = torch.tensor(number)
        distributed.all_reduce(numbers, distributed.ReduceOp.MAX, group=self.group)
        return int(numbers)

    def wait(self) -> None:
        """Until all ranks have come here."""
        if self.number > 1:
            distributed.barrier(group=self.group)

    def part(self) -> None:
        """They have nothing more to tell each other, so that the first may take its time alone."""
        if self.number > 1:
            distributed.destroy_process_group()

    def leave(self) -> NoReturn:
        """End this process, which is not the first."""
        assert not self.is_first
        raise SystemExit(0)
