"""The check in front of a training that packs are exact here: with this model, GPU, driver and these libraries.

Design: kernels, compilers and CUDA graphs have given wrong results without an error, each with some version on some
GPU. So the first pack is computed with the layers that will train, and its loss and gradients are compared with those
of some of its questions as rows, which the model has computed as it was loaded: before anything of it was compiled,
joined or captured. The other questions are in the pack but have no weight in its loss, so what they are must not
matter. LoRA's matrices B are zero at first, which would hide the gradients of A, so they are drawn for the check.

No difference has a fixed limit. It may be `FACTOR` times the spread, the largest difference between exact computations
of the same rows: several together, with layers that round their results once more, and some of them alone. Gradients
are compared for each kind of weight, such as all A of q_proj. Faults change results much more than rounding does, so
the factor only keeps chance from raising an alarm.

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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.dropout import _DropoutNd

from lookonce.errors import TrainingError
from lookonce.train.data.batches import Batch, RowCollator, image_inputs, image_keys
from lookonce.train.data.dataset import PackIndices
from lookonce.train.data.sampler import MicroBatch
from lookonce.train.model.compile import checkpointed
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import is_sharded, text_model
from lookonce.train.model.packs import is_on_packs, share_of_loss

# A trainer is a `PackTrainer`, which imports this module.

VARIABLE = "LOOKONCE_SELFTEST"
"""The environment variable that switches the check off."""
OFF = ("off", "0", "false", "no")
STOCK_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's attention without cuDNN's, which takes a second to prepare for each shape."""
NUM_PASSES, NUM_ROWS = 3, 4
"""Passes over the pack, and questions whose loss each computes."""
STD = 0.04
"""Standard deviation of LoRA's matrices B in the check, times LoRA's scale."""
FACTOR = 4
"""How many times the spread a difference may be."""
MAX_SPREAD = 0.2
"""With a larger spread nothing can be said, or with one that is not a number."""
LOSS = "loss"
ROUNDING = 16 * torch.finfo(torch.float32).eps
"""The smallest spread: what the rounding of float32 makes in a sum of some hundred terms, the root of their number."""


@dataclass(frozen=True)
class Outcome:
    """Loss and gradients of some passes, in main memory."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    """By the weight's name."""

    @classmethod
    def of(cls, model: Any, loss: torch.Tensor) -> Outcome:
        """The loss with the gradients of a model, which are then cleared."""
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        gradients = {
            name: torch.zeros(weight.shape) if weight.grad is None else weight.grad.detach().float().cpu()
            for name, weight in named
        }
        model.zero_grad(set_to_none=True)
        return cls(loss.detach().float().cpu(), gradients)

    def distance(self, other: Outcome) -> tuple[float, float]:
        """The relative distances of loss and gradients."""
        loss = _ratio(float((self.loss - other.loss).abs()), float(other.loss.abs()))
        distances, squares = zip(*self._squares(other).values(), strict=True)
        return loss, _ratio(sum(distances) ** 0.5, sum(squares) ** 0.5)

    def distances(self, other: Outcome) -> dict[str, float]:
        """The same, with the gradients of each kind of weight: those of all layers together.

        A kind with hardly any gradient is left out.
        """
        kinds = self._squares(other)
        smallest = 1e-12 * sum(square for _, square in kinds.values())
        loss, _ = self.distance(other)
        return {LOSS: loss} | {
            kind: _ratio(distance**0.5, square**0.5)
            for kind, (distance, square) in kinds.items()
            if not square <= smallest
        }

    def _squares(self, other: Outcome) -> dict[str, tuple[float, float]]:
        """For each kind of weight the squares of the norms of difference and reference."""
        sums: dict[str, tuple[float, float]] = {}
        for name, reference in other.gradients.items():
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            distance, square = sums.get(kind, (0.0, 0.0))
            difference = (self.gradients[name] - reference).double().square().sum()
            sums[kind] = distance + float(difference), square + float(reference.double().square().sum())
        return sums


def _ratio(distance: float, norm: float) -> float:
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 and math.isfinite(distance) else math.inf


def first_pack_of(trainer: Any, step: int) -> PackIndices | None:
    """The pack to check before the step with a number; None if packs are not computed on a GPU, or cannot be compared
    with rows."""
    model, sampler, args = trainer.model, trainer.train_sampler, trainer.args
    is_off = os.environ.get(VARIABLE, "").lower() in OFF
    if is_off or not trainer.collator.pads_to_blocks or sampler.dataset.features.has_tower:
        return None
    if is_sharded(model) or is_on_packs(model):
        return None
    text = text_model(model)
    is_random = any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())
    is_random |= bool(getattr(text.config, "attention_dropout", 0) or args.neftune_noise_alpha)
    if is_random or linear_layers(text):
        return None
    num_steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * sampler.num_steps)
    packs: list[PackIndices] = next(sampler.steps(step, step + 1), []) if step < num_steps else []
    return next((pack for pack in packs if not pack.micro_batch.pack.is_filler), None)


def rounding_of(args: Any, model: Any) -> float:
    """The distance between one and the next number in the coarsest precision of a training's matrix products."""
    is_tf32 = args.device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"  # as coarse as fp16
    used = {weight.dtype for weight in model.parameters()} & {torch.bfloat16, torch.float16}
    used |= {torch.bfloat16} if args.bf16 else {torch.float16} if args.fp16 or is_tf32 else {torch.float32}
    return max(float(torch.finfo(dtype).eps) for dtype in used)


class FirstPack:
    """A pack beside some of its questions as rows."""

    def __init__(self, trainer: Any, pack: PackIndices) -> None:
        """Compute the rows on the trainer's model, which must be as it was loaded."""
        self._trainer, self._pack = trainer, pack
        model, device = trainer.model, trainer.args.device
        eps = rounding_of(trainer.args, model)
        has_fp8 = any(tensor.dtype == torch.float8_e4m3fn for tensor in (*model.parameters(), *model.buffers()))
        self._floor = max(ROUNDING, eps / 2 if has_fp8 else eps / 4)
        """The smallest spread. Products of fp8 round more coarsely than all others, and not only between layers."""
        self._scale = 2.0**10 if trainer.args.fp16 else 1.0
        chosen = random.Random(0).sample(range(len(pack)), min(NUM_PASSES * NUM_ROWS, len(pack)))
        self._passes = [chosen[start : start + NUM_ROWS] for start in range(0, len(chosen), NUM_ROWS)]
        """For each pass the questions whose loss it computes, by their position in the pack."""
        self._drawn = self._draw()
        model.zero_grad(set_to_none=True)
        was_training = model.training
        with (
            checkpointed(model, True),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            sdpa_kernel(STOCK_KERNELS),
            self._on_drawn_weights(),
        ):
            self._rows = [self._computed(positions, eps) for positions in self._passes]
        model.train(was_training)
        found = [distances for _, spread in self._rows for distances in spread]
        self._spread = {what: max(distances.get(what, 0.0) for distances in found) for what in found[0]}

    def check(self, model: Any) -> str:
        """Compare the pack as `model` computes it: the trainer's, as it is called in training. Says what was found.

        Raises:
            TrainingError: they differ too much.
        """
        if not max(self._spread.values()) < MAX_SPREAD:
            return (
                "the first pack is not checked: rounding alone changes loss or gradients by "
                f"{max(self._spread.values()):.1e}, which would hide a fault"
            )
        allowed = {what: FACTOR * max(spread, self._floor) for what, spread in self._spread.items()}
        largest = dict.fromkeys(allowed, 0.0)
        with self._on_drawn_weights():
            for positions, (reference, _) in zip(self._passes, self._rows, strict=True):
                if self._trainer.captured:
                    self._fill_buffers(model)
                distances = self._pass(model, positions).distances(reference)
                largest = {what: max(distance, distances.get(what, 0.0)) for what, distance in largest.items()}
        worst = max(allowed, key=lambda what: largest[what] / allowed[what])
        if not largest[worst] <= allowed[worst]:
            what = "loss" if worst == LOSS else f"gradient of {worst}"
            raise TrainingError(
                f"packs are not exact on this machine: the {what} of the first pack differs by "
                f"{largest[worst]:.1e} from that of its questions as separate rows, and rounding explains at most "
                f"{allowed[worst]:.1e}; train without CUDA graphs: "
                "--set train.cuda_graphs=false; or not compiled either: --set train.compile=false; `lookonce selftest` "
                f"compares all settings with a small model; {VARIABLE}=off in the environment skips this check"
            )
        loss, gradients = largest[LOSS], max(largest[what] for what in largest if what != LOSS)
        return (
            f"the first pack agrees with its questions as separate rows: loss differs by {loss:.1e} and "
            f"gradients by {gradients:.1e}; rounding alone makes {self._spread[LOSS]:.1e} and "
            f"{max(self._spread.values()):.1e}"
        )

    def _draw(self) -> dict[str, torch.Tensor]:
        """The weights of the check: random matrices B, with which LoRA adds as much whatever its scale is."""
        generator, drawn = torch.Generator().manual_seed(0), {}
        for name, weight in self._trained():
            drawn[name] = weight.to("cpu", copy=True)
            layer, is_b, adapter = name.partition(".lora_B.")
            if is_b:
                scale = self._trainer.model.get_submodule(layer).scaling[adapter.partition(".")[0]]
                drawn[name].normal_(0, STD / scale, generator=generator)
        return drawn

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, weight.detach()) for name, weight in self._trainer.model.named_parameters() if weight.requires_grad
        ]

    @contextlib.contextmanager
    def _on_drawn_weights(self) -> Iterator[None]:
        """Give the weights the values of the check within the block, in place: captured passes read them there."""
        trained = self._trained()
        before = [weight.to("cpu", copy=True) for _, weight in trained]
        for name, weight in trained:
            weight.copy_(self._drawn[name])
        try:
            yield
        finally:
            for (_, weight), value in zip(trained, before, strict=True):
                weight.copy_(value)

    def _pass(self, model: Any, positions: Sequence[int]) -> Outcome:
        """The pack with the weights of some questions."""
        trainer, weight = self._trainer, 1 / self._num_targets(positions)
        weights = tuple(weight if position in positions else 0.0 for position in range(len(self._pack)))
        batch = self._batch_of(replace(self._pack.micro_batch, target_weights=weights))
        with trainer.accelerator.no_sync(model), trainer.compute_loss_context_manager():
            loss = self._backward(model, batch)
        if trainer.passes:
            trainer.passes.needs_average = False
        return Outcome.of(trainer.model, loss)

    def _fill_buffers(self, model: Any) -> None:
        """Leave other values in the buffers of the captured pass: those of the pack in reverse order."""
        pack = self._pack.micro_batch.pack
        reverse = replace(pack, groups=pack.groups[::-1])
        weights = tuple(1.0 + position for position in range(len(self._pack)))
        with self._trainer.compute_loss_context_manager():
            share_of_loss(model, self._batch_of(replace(self._pack.micro_batch, pack=reverse, target_weights=weights)))

    def _batch_of(self, micro_batch: MicroBatch) -> Batch:
        [indices] = self._trainer.train_sampler.step_of([micro_batch])
        batch: Batch = self._trainer.batch_of(indices)
        return batch

    def _computed(self, positions: Sequence[int], eps: float) -> tuple[Outcome, list[dict[str, float]]]:
        """Questions as rows, several together, and the distances of other exact computations."""
        together = self._as_rows(positions, len(positions))
        with _rounding_once_more(self._trainer.model, eps):
            others = [self._as_rows(positions, len(positions))]
        if positions is self._passes[0]:  # once, as it takes as long as all others together
            others.append(self._as_rows(positions, 1))
        return together, [other.distances(together) for other in others]

    def _as_rows(self, positions: Sequence[int], rows_per_pass: int) -> Outcome:
        trainer, model, dataset = self._trainer, self._trainer.model.train(), self._trainer.train_sampler.dataset
        rows = RowCollator.of(dataset.chat_tokenizer, dataset.features)
        examples = [dataset[self._pack[position]] for position in positions]
        longest = max(example.num_tokens for example in examples)
        rows_per_pass = max(1, min(rows_per_pass, self._pack.micro_batch.pack.num_tokens // longest))
        total = torch.zeros((), device=trainer.args.device)
        for start in range(0, len(examples), rows_per_pass):
            some = examples[start : start + rows_per_pass]
            text = rows.text_batch(some, [1 / self._num_targets(positions)] * len(some))
            batch = text | image_inputs(dataset.features, image_keys(some), trainer.args.device)
            with trainer.accelerator.autocast():  # as in the forward method that accelerate makes for the training
                total += self._backward(model, batch)
        return Outcome.of(model, total)

    def _num_targets(self, positions: Sequence[int]) -> int:
        dataset = self._trainer.train_sampler.dataset
        return max(1, sum(int(dataset[self._pack[position]].num_targets) for position in positions))

    def _backward(self, model: Any, batch: Batch) -> torch.Tensor:
        loss = share_of_loss(model, batch)
        with torch.autocast(loss.device.type, enabled=False):
            (self._scale * loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()


@contextlib.contextmanager
def _rounding_once_more(model: Any, eps: float) -> Iterator[None]:
    """Multiply the results of each layer by random numbers that are as far from one as rounding is."""
    half = eps / 2

    def rounded(layer: Any, inputs: Any, result: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(result, dtype=torch.float32).uniform_(-half, half)
        return (result * (1 + noise)).to(result.dtype)

    with contextlib.ExitStack() as hooks:
        for layer in text_model(model).layers:
            hooks.enter_context(layer.register_forward_hook(rounded))
        yield
