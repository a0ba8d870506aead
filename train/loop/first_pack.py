"""The check in front of a training that packs are exact here: with this model, GPU, driver and these libraries.

docs/selftest.md says what is compared and why. The rows are computed while the model is as it was loaded: before
anything of it was compiled, joined or captured. The other questions of the pack have no weight in its loss, so what
they are must not matter. LoRA's matrices B are zero at first, which would hide the gradients of A, so they are drawn.

A difference may be `FACTOR` times the spread, the largest difference between exact computations of the same rows:
together, with layers that round their results once more, and in smaller batches. Gradients are compared for each kind
of weight, such as all A of q_proj. Faults change results much more than rounding does, so the factor only keeps chance
from raising an alarm. The cost is two or three seconds before each start.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.dropout import _DropoutNd

from lookonce.errors import TrainingError
from lookonce.train.data.batches import Batch, RowCollator, image_inputs, image_keys
from lookonce.train.data.dataset import PackIndices
from lookonce.train.data.sampler import MicroBatch
from lookonce.train.data.tokenize import Example
from lookonce.train.model.compile import checkpointed
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import base_model, is_sharded, text_model
from lookonce.train.model.loss import ADVANTAGES, LOG_PROBS, RewardLoss
from lookonce.train.model.packs import is_on_packs, share_of_loss

# A trainer is a `PackTrainer`, which imports this module.

VARIABLE = "LOOKONCE_SELFTEST"
"""The environment variable that switches the check off."""
OFF = ("off", "0", "false", "no")
STOCK_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""PyTorch's attention without cuDNN's, which takes a second to prepare for each shape."""
NUM_ROWS = 8
"""How many questions are compared."""
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
    """Loss and gradients of some passes."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    """By the weight's name."""

    @classmethod
    def of(cls, model: Any, loss: torch.Tensor) -> Outcome:
        """The loss with the gradients of a model, which are then cleared."""
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        gradients = {  # copies, as a captured pass overwrites its own
            name: torch.zeros_like(weight, dtype=torch.float32)
            if weight.grad is None
            else weight.grad.detach().to(torch.float32, copy=True)
            for name, weight in named
        }
        model.zero_grad(set_to_none=True)
        return cls(loss.detach().float(), gradients)

    def cpu(self) -> Outcome:
        """The same in main memory."""
        return Outcome(self.loss.cpu(), {name: gradient.cpu() for name, gradient in self.gradients.items()})

    def distance(self, other: Outcome) -> tuple[float, float]:
        """The relative distances of loss and gradients."""
        loss = _ratio(abs(float(self.loss) - float(other.loss)), abs(float(other.loss)))
        distances, squares = zip(*self._squares(other).values(), strict=True)
        return loss, _ratio(sum(distances) ** 0.5, sum(squares) ** 0.5)

    def distances(self, other: Outcome) -> dict[str, float]:
        """The same with the gradients of each kind of weight, of all layers; not of kinds with hardly any."""
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
        sums: dict[str, torch.Tensor] = {}
        for name, gradient in self.gradients.items():
            kind = ".".join(part for part in name.split(".") if not part.isdigit())
            reference = other.gradients[name].to(gradient.device).double()
            squares = torch.stack([(gradient - reference).square().sum(), reference.square().sum()])
            sums[kind] = sums.get(kind, 0) + squares
        return {kind: (float(distance), float(square)) for kind, (distance, square) in sums.items()}


def _ratio(distance: float, norm: float) -> float:
    if distance == 0:
        return 0.0
    return distance / norm if norm > 0 and math.isfinite(distance) else math.inf


def first_pack_of(trainer: Any, step: int) -> PackIndices | None:
    """The pack to check before a step; None if packs are not computed on a GPU, or cannot be compared with rows."""
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
    packs: list[PackIndices] = trainer.first_packs(step) if step < num_steps else []
    return next((pack for pack in packs if not pack.micro_batch.pack.is_filler), None)


def of_similar_length(examples: Iterable[Example], max_tokens: int) -> list[list[Example]]:
    """Rows for as few passes as hold at most so many tokens each, or one row, when all are as long as the longest."""
    passes: list[list[Example]] = []
    for example in sorted(examples, key=lambda each: each.num_tokens):
        if passes and (len(passes[-1]) + 1) * example.num_tokens <= max_tokens:
            passes[-1].append(example)
        else:
            passes.append([example])
    return passes


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
        self._positions = random.Random(0).sample(range(len(pack)), min(NUM_ROWS, len(pack)))
        """The questions that are compared, by their position in the pack."""
        self._drawn = self._draw()
        model.zero_grad(set_to_none=True)
        was_training = model.training
        with (
            checkpointed(model, True),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            sdpa_kernel(STOCK_KERNELS),
            self._on_drawn_weights(),
        ):
            rows, others = self._as_rows(), [self._as_rows(parts=2)]
            with _rounding_once_more(model, eps):
                others.append(self._as_rows())
            spreads = [other.distances(rows) for other in others]
            self._rows = rows.cpu()  # a training needs all of the GPU's memory
        model.train(was_training)
        self._spread = {what: max(distances.get(what, 0.0) for distances in spreads) for what in spreads[0]}

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
        with self._on_drawn_weights():
            if self._trainer.captured:
                self._fill_buffers(model)
            distances = self._pass(model).distances(self._rows)
        worst = max(allowed, key=lambda what: distances.get(what, 0.0) / allowed[what])
        if not distances.get(worst, 0.0) <= allowed[worst]:
            what = "loss" if worst == LOSS else f"gradient of {worst}"
            raise TrainingError(
                f"packs are not exact on this machine: the {what} of the first pack differs by "
                f"{distances[worst]:.1e} from that of its questions as separate rows, and rounding explains at most "
                f"{allowed[worst]:.1e}; train without CUDA graphs: "
                "--set train.cuda_graphs=false; or not compiled either: --set train.compile=false; `lookonce selftest` "
                f"compares all settings with a small model; {VARIABLE}=off in the environment skips this check"
            )
        loss, gradients = distances[LOSS], max(distances.get(what, 0.0) for what in allowed if what != LOSS)
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

    def _pass(self, model: Any) -> Outcome:
        """The pack, in whose loss only the compared questions have a weight."""
        trainer, weight = self._trainer, 1 / self._num_targets()
        weights = tuple(weight if position in self._positions else 0.0 for position in range(len(self._pack)))
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
        batch: Batch = self._trainer.batch_of(self._trainer.indices_of(micro_batch))
        if ADVANTAGES in batch:  # then the gradient is that of the log-probabilities
            batch[ADVANTAGES].fill_(1)
        return batch

    def _as_rows(self, parts: int = 1) -> Outcome:
        """The compared questions as rows, as many together as have the tokens of the pack, or a part of these."""
        trainer, model = self._trainer, self._trainer.model.train()
        dataset = trainer.train_sampler.dataset
        rows = RowCollator.of(dataset.chat_tokenizer, dataset.features)
        passes = of_similar_length(self._examples, self._pack.micro_batch.pack.num_tokens)
        total = torch.zeros((), device=trainer.args.device)
        for together in (each[part::parts] for each in passes for part in range(min(parts, len(each)))):
            text = rows.text_batch(together, [1 / self._num_targets()] * len(together))
            batch = text | image_inputs(dataset.features, image_keys(together), trainer.args.device)
            with trainer.accelerator.autocast(), _at_temperature(model, trainer.of_rewards):  # as in the training
                total += self._backward(model, batch)
        return Outcome.of(model, total)

    @property
    def _examples(self) -> list[Example]:
        examples = self._trainer.examples_of(self._pack)
        return [examples[self._pack[position]] for position in self._positions]

    def _num_targets(self) -> int:
        return max(1, sum(int(example.num_targets) for example in self._examples))

    def _backward(self, model: Any, batch: Batch) -> torch.Tensor:
        loss = share_of_loss(model, batch)
        with torch.autocast(loss.device.type, enabled=False):
            (self._scale * loss).backward()  # type: ignore[no-untyped-call]
        if LOG_PROBS in batch:
            return -(batch["weights"] * batch[LOG_PROBS]).sum()
        return loss.detach()


@contextlib.contextmanager
def _at_temperature(model: Any, of_rewards: RewardLoss | None) -> Iterator[None]:
    """Divide the logits by the temperature of a loss of rewards."""
    if of_rewards is None or of_rewards.temperature == 1:
        yield
        return
    temperature, head = of_rewards.temperature, base_model(model).get_output_embeddings()
    with head.register_forward_hook(lambda head, inputs, logits: logits.float() / temperature):
        yield


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
