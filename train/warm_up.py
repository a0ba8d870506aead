"""A trial of the longest packs as training begins: compiles for each length, and shows whether they fit the GPU.

Design: measured and not computed, since what a pack needs depends on the model, the adapter, checkpointing and the
compiler. It costs one forward and backward pass for each of a few lengths, and the time to compile, which would have to
be spent anyhow, but in the middle of training. What is compiled for later than that should not have been, and is told.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce.errors import TrainingError
from lookonce.text import duration, size
from lookonce.train.fast_layers import num_graphs
from lookonce.train.lengths import fitting
from lookonce.train.loss import forward_loss
from lookonce.train.order import Forward
from lookonce.train.trainer import RunTrainer


@dataclass(frozen=True)
class Trial:
    """What it showed."""

    lengths: list[int]
    seconds: float
    peak_bytes: int
    total_bytes: int

    def text(self) -> str:
        packs = f"packs of {', '.join(f'{length:,}' for length in self.lengths)} tokens"
        return (
            f"tried {packs} in {duration(self.seconds)}, compilation included; they need {size(self.peak_bytes)} of "
            f"this GPU's {size(self.total_bytes)}"
        )


class WarmUp(TrainerCallback):
    """Makes the trial when a trainer has its model ready, and watches for what is compiled in later steps."""

    def __init__(self, trainer: RunTrainer, say: Callable[[str], None]) -> None:
        self._trainer, self._say = trainer, say
        self._num_graphs = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.feed.lengths:
            self._say(try_out(self._trainer).text())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._num_graphs = num_graphs()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.feed.lengths and (new := num_graphs() - self._num_graphs):
            self._say(
                f"step {state.global_step} compiled {new} graphs anew, which took its time: something in it, such as a "
                "pack's length, was not in the trial"
            )


def try_out(trainer: RunTrainer) -> Trial:
    """Run the fullest pack of each length forward and backward, and forget the gradients.

    Raises:
        TrainingError: one of them does not fit; says what to lower.
    """
    torch.cuda.reset_peak_memory_stats()
    start, fullest = time.perf_counter(), _fullest(trainer)
    with torch.random.fork_rng(devices=[trainer.feed.device]):
        for length, forward in sorted(fullest.items(), reverse=True):
            try:
                _run(trainer, forward)
            except torch.OutOfMemoryError:
                raise TrainingError(_too_long(trainer, length)) from None
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(trainer.feed.device).total_memory
    return Trial(sorted(fullest), time.perf_counter() - start, torch.cuda.max_memory_allocated(), total)


def _fullest(trainer: RunTrainer) -> dict[int, Forward]:
    """For each length that occurs in the first epochs, its pack with the most tokens, on any rank.

    All ranks try the same packs: weights that are spread over them are put together by all at once.
    """
    found: dict[int, Forward] = {}
    order, lengths = trainer.feed.order, trainer.feed.lengths
    orders = [replace(order, rank=rank) for rank in range(order.num_ranks)]
    epochs = (epoch for number in itertools.count() for epoch in (of_rank.epoch(number) for of_rank in orders))
    forwards = (forward for epoch in epochs for step in epoch for forward in step)
    for forward in itertools.islice(forwards, sum(map(len, order.lengths_to_come()))):
        length = fitting(forward.pack.num_tokens, lengths)
        if length not in found or found[length].pack.num_tokens < forward.pack.num_tokens:
            found[length] = forward
    return found


def _run(trainer: RunTrainer, forward: Forward) -> None:
    model: Any = trainer.model_wrapped  # as it trains: under autocast, and in several processes
    model.train()
    with trainer.accelerator.no_sync(model):
        trainer.accelerator.backward(forward_loss(model, trainer.feed.batch(forward), trainer.mask))
    model.zero_grad(set_to_none=True)


def _too_long(trainer: RunTrainer, length: int) -> str:
    total = torch.cuda.get_device_properties(trainer.feed.device).total_memory
    limit = trainer.feed.order.batch.tokens_per_pack
    return (
        f"a pack of {length:,} tokens does not fit this GPU of {size(total)}; lower batch.tokens_per_pack (now "
        f"{limit:,}) or set train.gradient_checkpointing: true"
    )
