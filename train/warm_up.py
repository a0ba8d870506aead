"""A trial of the longest pack as training begins: compiles the model, and shows whether packs fit the GPU.

Design: measured and not computed, since what a pack needs depends on the model, the adapter, checkpointing and the
compiler. It costs a forward and backward pass or two, and the time to compile, which would have to be spent anyhow.
What is compiled later than that should not have been, and is told. The longest pass is the first to be recorded, so
that the memory of all the others finds room in its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce.errors import TrainingError
from lookonce.text import duration, size
from lookonce.train.fast_layers import num_graphs
from lookonce.train.order import Forward
from lookonce.train.trainer import RunTrainer


@dataclass(frozen=True)
class Trial:
    """What it showed."""

    num_tokens: int
    seconds: float
    peak_bytes: int
    total_bytes: int

    def text(self) -> str:
        return (
            f"tried the longest pack, {self.num_tokens:,} tokens, in {duration(self.seconds)}, compilation included; "
            f"it needs {size(self.peak_bytes)} of this GPU's {size(self.total_bytes)}"
        )


class WarmUp(TrainerCallback):
    """Makes the trial when a trainer has its model ready, and watches for what is compiled in later steps."""

    def __init__(self, trainer: RunTrainer, say: Callable[[str], None]) -> None:
        self._trainer, self._say = trainer, say
        self._num_graphs = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.feed.in_blocks:
            self._say(try_out(self._trainer).text())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._num_graphs = num_graphs()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.feed.in_blocks and (new := num_graphs() - self._num_graphs):
            self._say(
                f"step {state.global_step} compiled {new} graphs anew, which took its time: something in it is not as "
                "it was in the trial"
            )


def try_out(trainer: RunTrainer) -> Trial:
    """Run the longest pack forward and backward, and forget the gradients.

    All ranks try the same one: weights that are spread over them are put together by all at once.

    Raises:
        TrainingError: it does not fit; says what to lower.
    """
    torch.cuda.reset_peak_memory_stats()
    start, longest = time.perf_counter(), trainer.feed.order.longest()
    with torch.random.fork_rng(devices=[trainer.feed.device]):
        try:
            trained = _run(trainer, longest)
            if trainer.records:
                trainer.record(trained)(trainer.feed.batch(longest))
        except torch.OutOfMemoryError:
            raise TrainingError(_too_long(trainer, longest.pack.num_tokens)) from None
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(trainer.feed.device).total_memory
    return Trial(longest.pack.num_tokens, time.perf_counter() - start, torch.cuda.max_memory_allocated(), total)


def _run(trainer: RunTrainer, forward: Forward) -> list[torch.Tensor]:
    """Give the weights that got gradients, which are forgotten."""
    model: Any = trainer.model_wrapped  # as it trains: under autocast, and in several processes
    model.train()
    with trainer.accelerator.no_sync(model):
        trainer.forward_backward(model, trainer.feed.batch(forward))
    trained = [weight for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return trained


def _too_long(trainer: RunTrainer, length: int) -> str:
    total = torch.cuda.get_device_properties(trainer.feed.device).total_memory
    limit = trainer.feed.order.batch.tokens_per_pack
    return (
        f"a pack of {length:,} tokens does not fit this GPU of {size(total)}; lower batch.tokens_per_pack (now "
        f"{limit:,}) or set train.gradient_checkpointing: true"
    )
