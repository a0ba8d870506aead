"""A trial of the longest packs before training: compiles for each length, and shows whether they fit the GPU.

Design: measured and not computed, since what a pack needs depends on the model, the adapter, checkpointing and the
compiler. It costs one forward and backward pass for each of a few lengths, and the time to compile, which would have to
be spent anyhow, but in the middle of training.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from lookonce.errors import TrainingError
from lookonce.text import duration, size
from lookonce.train.lengths import fitting
from lookonce.train.loss import forward_loss
from lookonce.train.order import Forward
from lookonce.train.trainer import RunTrainer


@dataclass(frozen=True)
class WarmUp:
    """What the trial showed."""

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


def warm_up(trainer: RunTrainer) -> WarmUp | None:
    """Run the fullest pack of each length forward and backward, and forget the gradients; on a GPU.

    Raises:
        TrainingError: one of them does not fit; says what to lower.
    """
    if not trainer.feed.lengths or not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    start, model = time.perf_counter(), trainer.model
    fullest = _fullest(trainer)
    with torch.random.fork_rng(devices=[trainer.feed.device]):
        for length, forward in sorted(fullest.items(), reverse=True):
            try:
                _run(trainer, model, forward)
            except torch.OutOfMemoryError:
                raise TrainingError(_too_long(trainer, length)) from None
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(trainer.feed.device).total_memory
    return WarmUp(sorted(fullest), time.perf_counter() - start, torch.cuda.max_memory_allocated(), total)


def _fullest(trainer: RunTrainer) -> dict[int, Forward]:
    """For each length that occurs in the first epoch, its pack with the most tokens."""
    found: dict[int, Forward] = {}
    for forward in (forward for step in trainer.feed.order.epoch(0) for forward in step):
        length = fitting(forward.pack.num_tokens, trainer.feed.lengths)
        if length not in found or found[length].pack.num_tokens < forward.pack.num_tokens:
            found[length] = forward
    return found


def _run(trainer: RunTrainer, model: Any, forward: Forward) -> None:
    model.train()
    with trainer.compute_loss_context_manager():
        loss = forward_loss(model, trainer.feed.batch(forward), trainer.mask)
    trainer.accelerator.backward(loss)
    model.zero_grad(set_to_none=True)


def _too_long(trainer: RunTrainer, length: int) -> str:
    total = torch.cuda.get_device_properties(trainer.feed.device).total_memory
    limit = trainer.feed.order.batch.tokens_per_pack
    return (
        f"a pack of {length:,} tokens does not fit this GPU of {size(total)}; lower batch.tokens_per_pack (now "
        f"{limit:,}) or set train.gradient_checkpointing: true"
    )
