"""The check in front of a training that packs are exact here: with this model, GPU, driver and these libraries.

Design: kernels, compilers and CUDA graphs have given wrong results without an error, each with some version on some
GPU. So the first pack is computed with the layers that will train, and its loss and gradients are compared with those
of some of its questions as rows, which the model has computed as it was loaded: before anything of it was compiled,
joined or captured. The other questions are in the pack but have no weight in its loss, so what they are must not
matter. LoRA's matrices B are zero at first, which would hide the gradients of A, so they are drawn for the check.

No difference has a fixed limit. It may be `FACTOR` times the spread, the largest difference between exact computations
of the same rows: several together, each alone, and with layers that round their results once more. Faults change
results much more than rounding does, so the factor only keeps chance from raising an alarm.

The cost: some seconds before each start, as 12 rows are computed two or three times. Left out are sharded weights;
dropout, which draws other numbers for rows; and linear attention, whose kernels would be tuned for rows for a minute.
`lookonce selftest` compares more, with a small model of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lookonce.errors import TrainingError
from lookonce.train.data.batches import Batch, RowCollator, image_inputs, image_keys
from lookonce.train.data.dataset import PackIndices
from lookonce.train.data.sampler import MicroBatch
from lookonce.train.model.compile import checkpointed
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import is_sharded, text_model
from lookonce.train.model.packs import share_of_loss

# A trainer is a `PackTrainer`, which imports this module.

VARIABLE = "LOOKONCE_SELFTEST"
"""The environment variable that switches the check off."""
OFF = ("off", "0", "false", "no")
STOCK_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's attention without cuDNN's, which takes a second to prepare for each shape."""
NUM_PASSES, NUM_ROWS = 3, 4
"""Passes over the pack, and questions whose loss each computes."""
STD = 0.02
"""Standard deviation of LoRA's matrices B in the check."""
FACTOR = 4
"""How many times the spread a difference may be."""
ROUNDING = 16 * torch.finfo(torch.float32).eps
"""The smallest spread: what the rounding of float32 makes in a sum of some hundred terms, the root of their number."""


@dataclass(frozen=True)
class Outcome:
    """Loss and gradients of some passes."""

    loss: torch.Tensor
    gradients: tuple[torch.Tensor, torch.Tensor]
    """The gradients of LoRA's matrices A, and those of all other weights."""

    @classmethod
    def of(cls, model: Any, loss: torch.Tensor) -> Outcome:
        """The loss with the gradients of a model, which are then cleared."""
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                found["lora_A" not in name].append(weight.grad.flatten().float())
        model.zero_grad(set_to_none=True)
        first, second = (torch.cat(gradients) if gradients else loss.new_zeros(0) for gradients in found)
        return cls(loss.detach().float(), (first, second))

    def distance(self, other: Outcome) -> tuple[float, float]:
        """Relative distances of loss and gradients; of the gradients those that differ more."""
        pairs = ((self.loss, other.loss), *zip(self.gradients, other.gradients, strict=True))
        loss, *gradients = [_ratio(float((one - two).norm()), float(two.norm())) for one, two in pairs]
        return loss, max(gradients)


def _ratio(distance: float, norm: float) -> float:
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 and math.isfinite(distance) else math.inf


def largest(distances: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The largest distance of losses and that of gradients."""
    losses, gradients = zip(*distances, strict=True)
    return max(losses), max(gradients)


def first_pack_of(trainer: Any, step: int) -> PackIndices | None:
    """The pack to check before the step with a number; None if packs are not computed on a GPU, or cannot be compared
    with rows."""
    model, sampler = trainer.model, trainer.train_sampler
    is_off = os.environ.get(VARIABLE, "").lower() in OFF
    if is_off or not trainer.collator.pads_to_blocks or sampler.dataset.features.has_tower or is_sharded(model):
        return None
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return None
    text = text_model(model)
    if getattr(text.config, "attention_dropout", 0) or linear_layers(text):
        return None
    packs: list[PackIndices] = next(sampler.steps(step, step + 1), [])
    return next((pack for pack in packs if not pack.micro_batch.pack.is_filler), None)


def rounding_of(args: Any) -> float:
    """The distance between one and the next number in the precision of a training's matrix products."""
    is_tf32 = args.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"  # as coarse as fp16
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 or is_tf32 else torch.float32
    return float(torch.finfo(dtype).eps)


class FirstPack:
    """A pack beside some of its questions as rows."""

    def __init__(self, trainer: Any, pack: PackIndices) -> None:
        """Compute the rows on the trainer's model, which must be as it was loaded."""
        self._trainer, self._pack = trainer, pack
        self._eps = rounding_of(trainer.args)
        chosen = random.Random(0).sample(range(len(pack)), min(NUM_PASSES * NUM_ROWS, len(pack)))
        self._chosen = [chosen[start : start + NUM_ROWS] for start in range(0, len(chosen), NUM_ROWS)]
        """By pass: the questions, as positions in the pack, whose loss it computes."""
        generator = torch.Generator().manual_seed(0)
        self._drawn = {
            name: torch.empty(weight.shape).normal_(0, STD, generator=generator)
            if "lora_B" in name
            else weight.to("cpu", copy=True)
            for name, weight in self._trained()
        }
        device = trainer.args.device
        with (
            checkpointed(trainer.model, True),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            sdpa_kernel(STOCK_KERNELS),
            self._on_drawn_weights(),
        ):
            self._rows = [self._computed(numbers) for numbers in self._chosen]
        self._spread = largest([distance for _, distances in self._rows for distance in distances])

    def check(self, model: Any) -> str:
        """Compare the pack as `model` computes it: the trainer's, as it is called in training. Says what was found.

        Raises:
            TrainingError: they differ too much.
        """
        distances = []
        with self._on_drawn_weights():
            for numbers, (expected, _) in zip(self._chosen, self._rows, strict=True):
                if self._trainer.captured:
                    self._fill_buffers(model)
                distances.append(self._pass(model, numbers).distance(expected))
        smallest = max(ROUNDING, self._eps / 8)
        found = largest(distances)
        allowed = [FACTOR * max(spread, smallest) for spread in self._spread]
        for what, difference, limit in zip(("loss", "gradients"), found, allowed, strict=True):
            if not difference <= limit:
                raise TrainingError(
                    f"packs are not exact on this machine: the {what} of the first pack differ from those of its "
                    f"questions as rows by {difference:.1e}, allowed {limit:.1e}; see which settings are exact here: "
                    f"lookonce selftest; {VARIABLE}=off in the environment skips this check"
                )
        return (
            f"packs are exact here: the first one's loss and gradients differ from rows by {found[0]:.1e} and "
            f"{found[1]:.1e} (allowed: {allowed[0]:.1e} and {allowed[1]:.1e})"
        )

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, weight.detach()) for name, weight in self._trainer.model.named_parameters() if weight.requires_grad
        ]

    @contextlib.contextmanager
    def _on_drawn_weights(self) -> Iterator[None]:
        """Give the weights the values of the check within the block, in place: captured passes read them there."""
        trained = self._trained()
        before = [weight.clone() for _, weight in trained]
        for name, weight in trained:
            weight.copy_(self._drawn[name])
        try:
            yield
        finally:
            for (_, weight), value in zip(trained, before, strict=True):
                weight.copy_(value)

    def _pass(self, model: Any, numbers: Sequence[int]) -> Outcome:
        """The pack with the weights of some questions."""
        trainer, weight = self._trainer, 1 / self._num_targets(numbers)
        weights = tuple(weight if number in numbers else 0.0 for number in range(len(self._pack)))
        with trainer.accelerator.no_sync(model):
            loss = self._backward(model, self._batch_of(replace(self._pack.micro_batch, target_weights=weights)))
        if trainer.passes:
            trainer.passes.needs_average = False
        return Outcome.of(trainer.model, loss)

    def _fill_buffers(self, model: Any) -> None:
        """Leave other values in the buffers of the captured pass: those of the pack in reverse order."""
        pack = self._pack.micro_batch.pack
        reverse = replace(pack, groups=pack.groups[::-1])
        weights = tuple(1.0 + number for number in range(len(self._pack)))
        with self._trainer.compute_loss_context_manager():
            share_of_loss(model, self._batch_of(replace(self._pack.micro_batch, pack=reverse, target_weights=weights)))

    def _batch_of(self, micro_batch: MicroBatch) -> Batch:
        [indices] = self._trainer.train_sampler.step_of([micro_batch])
        batch: Batch = self._trainer.batch_of(indices)
        return batch

    def _computed(self, numbers: Sequence[int]) -> tuple[Outcome, list[tuple[float, float]]]:
        """Questions as rows, several together, and the distances of other exact computations."""
        together = self._as_rows(numbers, len(numbers))
        with _rounding_once_more(self._trainer.model, self._eps):
            others = [self._as_rows(numbers, len(numbers))]
        if numbers is self._chosen[0]:  # once, as it takes as long as all others together
            others.append(self._as_rows(numbers, 1))
        return together, [other.distance(together) for other in others]

    def _as_rows(self, numbers: Sequence[int], rows_per_pass: int) -> Outcome:
        model = self._trainer.model.train()
        examples = [self._trainer.train_sampler.dataset[self._pack[number]] for number in numbers]
        longest = max(example.num_tokens for example in examples)
        rows_per_pass = max(1, min(rows_per_pass, self._pack.micro_batch.pack.num_tokens // longest))
        total = torch.zeros((), device=self._trainer.args.device)
        for start in range(0, len(examples), rows_per_pass):
            total += self._backward(model, self._rows_of(examples[start : start + rows_per_pass], numbers))
        return Outcome.of(model, total)

    def _rows_of(self, examples: Sequence[Any], numbers: Sequence[int]) -> Batch:
        dataset, device = self._trainer.train_sampler.dataset, self._trainer.args.device
        weights = [1 / self._num_targets(numbers)] * len(examples)
        text = RowCollator.of(dataset.chat_tokenizer, dataset.features).text_batch(examples, weights)
        return text | image_inputs(dataset.features, image_keys(examples), device)

    def _num_targets(self, numbers: Sequence[int]) -> int:
        dataset = self._trainer.train_sampler.dataset
        return max(1, sum(int(dataset[self._pack[number]].num_targets) for number in numbers))

    def _backward(self, model: Any, batch: Batch) -> torch.Tensor:
        with self._trainer.compute_loss_context_manager():
            loss = share_of_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


@contextlib.contextmanager
def _rounding_once_more(model: Any, eps: float) -> Iterator[None]:
    """Multiply the results of each layer by random numbers that are as far from one as rounding is."""
    half = eps / 2

    def rounded(layer: Any, inputs: Any, result: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(result, dtype=torch.float32).uniform_(-half, half)
        return (result * (1 + noise)).to(result.dtype)

    hooks = [layer.register_forward_hook(rounded) for layer in text_model(model).layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
