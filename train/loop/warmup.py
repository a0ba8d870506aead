"""A trial of the longest pack as training begins: compiles the model, and shows whether packs fit the GPU.

Design: measured and not computed, since what a pack needs depends on the model, the adapter, checkpointing and the
compiler. It costs a few passes, the time to compile and the time to record, which would have to be spent anyhow. What
is compiled later than that should not have been, and is told. Passes are recorded from the longest to the shortest, so
that the memory of each finds room in that of the ones before; a shape that turns up later is recorded then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce.errors import TrainingError
from lookonce.text import Notify, duration, size
from lookonce.train.data.sampler import Forward, Order
from lookonce.train.loop.trainer import RunTrainer, out_of_memory
from lookonce.train.model.compile import num_graphs
from lookonce.train.model.cuda_graphs import Shape, shape_of
from lookonce.train.model.fsdp import is_sharded


@dataclass(frozen=True)
class Trial:
    """What it showed."""

    num_tokens: int
    seconds: float
    num_recorded: int
    record_seconds: float
    peak_bytes: int
    """Of PyTorch's memory: what a pass holds or recorded passes have reserved, and what the optimizer will add."""
    total_bytes: int

    def text(self) -> str:
        recorded = f", recorded {self.num_recorded} shapes of packs in {duration(self.record_seconds)}"
        return (
            f"tried the longest pack, {self.num_tokens:,} tokens, in {duration(self.seconds)}, compilation included"
            f"{recorded if self.num_recorded else ''}; this needs {size(self.peak_bytes)} of this GPU's "
            f"{size(self.total_bytes)}"
        )


class WarmUp(TrainerCallback):
    """Makes the trial when a trainer has its model ready, and watches for what is compiled in later steps."""

    def __init__(self, trainer: RunTrainer, notify: Notify) -> None:
        self._trainer, self._notify = trainer, notify
        self._num_graphs = 0
        self.trial: Trial | None = None
        """None until it is made, and where none is."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.feed.in_blocks and state.global_step < state.max_steps:
            self.trial = try_out(self._trainer)
            self._notify(self.trial.text())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._num_graphs = num_graphs()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.feed.in_blocks and (new := num_graphs() - self._num_graphs):
            self._notify(
                f"step {state.global_step} compiled {new} graphs anew, which took its time: something in it is not as "
                "it was in the trial"
            )


def try_out(trainer: RunTrainer) -> Trial:
    """Try what is to come: the longest pack, forward and backward, whose gradients are forgotten; recording what can be
    recorded; the longest pack to validate with.

    All ranks try the same ones: weights that are spread over them are put together by all at once.

    Raises:
        TrainingError: it does not fit; says what to lower.
    """
    start, packs = time.perf_counter(), kinds(trainer.feed.order, trainer.state.global_step, trainer.state.max_steps)
    longest, shortest = list(packs.values())[0], list(packs.values())[-1]
    num_tokens = longest.pack.num_tokens
    torch.cuda.reset_peak_memory_stats()
    with torch.random.fork_rng(devices=[trainer.feed.device]):
        try:
            trained = _run(trainer, longest)
            _run(trainer, shortest)  # what is compiled for one length first is compiled for all when another comes
            torch.cuda.synchronize()
            tried, launched = time.perf_counter(), torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            if trainer.uses_graphs:
                with_images = next((forward for shape, forward in packs.items() if shape[-1]), longest)
                trainer.record_passes(trained, list(packs), trainer.feed.batch(with_images))
            _validate(trainer)
        except torch.OutOfMemoryError:
            raise TrainingError(out_of_memory(trainer.feed, num_tokens)) from None
    torch.cuda.synchronize()
    ended = time.perf_counter()
    # Since the cache was emptied nothing was given back, so what is reserved now is the most that recording has needed.
    peak = max(launched, torch.cuda.memory_reserved()) + _bytes_of_optimizer(trainer, trained)
    total = torch.cuda.get_device_properties(trainer.feed.device).total_memory
    return Trial(num_tokens, tried - start, len(packs) if trainer.uses_graphs else 0, ended - tried, peak, total)


def kinds(order: Order, start: int, end: int) -> dict[Shape, Forward]:
    """Of what is coming, a forward pass of each shape; those with the most tokens first."""
    longest_first = sorted(order.coming(start, end), key=lambda forward: -forward.pack.num_tokens)
    found: dict[Shape, Forward] = {}
    for forward in longest_first:
        has_images = any(order.examples[group.examples[0]].image_keys for group in forward.pack.groups)
        found.setdefault(shape_of(forward.pack.num_tokens, order.num_targets(forward), has_images), forward)
    return found


def _run(trainer: RunTrainer, forward: Forward) -> list[torch.Tensor]:
    """Give the weights that got gradients, which are forgotten."""
    model: Any = trainer.model_wrapped  # as it trains: under autocast, and in several processes
    model.train()
    with trainer.accelerator.no_sync(model):
        trainer.forward_backward(model, trainer.feed.batch(forward))
    trained = [weight for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return trained


def _validate(trainer: RunTrainer) -> None:
    """Run the longest pack of the validation, which has to find room beside what is recorded."""
    if feed := trainer.eval_feed:
        longest = max(feed.order.coming(0, 1), key=lambda forward: forward.pack.num_tokens)
        model: Any = trainer.model
        model.eval()
        trainer.validation_loss(feed.batch(longest))
        if is_sharded(model):
            model.reshard()


def _bytes_of_optimizer(trainer: RunTrainer, trained: list[torch.Tensor]) -> int:
    """What it will need beside the weights and their gradients: two numbers each, as Adam keeps; 0 if it has them."""
    optimizer: Any = trainer.optimizer
    return 0 if optimizer.state else 2 * sum(weight.nbytes for weight in trained)
