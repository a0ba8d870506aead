"""The trial of the longest pack in front of a training.

The trial compiles the model and shows whether packs fit. Memory is measured, since it depends on the model, the
adapter, gradient checkpointing and the compiler. Later recompilations are unexpected and reported. Passes over the
longest pack and that with most targets are captured first, so that those of other shapes fit into their memory; these
are captured when a pack first has their shape. Of the 47 shapes of an epoch of Kvasir-VQA, the first 50 steps need 31,
so training begins 12 seconds sooner than with all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from lookonce.errors import TrainingError
from lookonce.run.startup import Startup
from lookonce.text import count, duration, size
from lookonce.train.data.dataset import PackIndices
from lookonce.train.data.tokenize import Example
from lookonce.train.model.compile import num_compiled_graphs
from lookonce.train.model.load import is_sharded
from lookonce.train.model.packs import Shape, shape_of

# A trainer is a `PackTrainer`, which imports this module.

COMPILE, CAPTURE = "compile and warm up", "capture CUDA graphs"
"""What the two longest parts of a trial are called among the pieces of work before the first step."""


@dataclass(frozen=True)
class Trial:
    num_tokens: int
    seconds: float
    num_shapes: int
    """Shapes of the coming packs; 0 if passes are not captured."""
    capture_seconds: float
    peak_bytes: int
    """PyTorch's memory: what a pass needs or captured passes reserve, and what the optimizer will add."""
    total_bytes: int

    def text(self) -> str:
        captured = (
            f", captured as a CUDA graph in {duration(self.capture_seconds)} "
            f"(each of {count(self.num_shapes, 'pack shape')} is when it first appears)"
        )
        return (
            f"warm-up: longest pack ({self.num_tokens:,} tokens) in {duration(self.seconds)}, including compilation"
            f"{captured if self.num_shapes else ''}; needs {size(self.peak_bytes)} of this GPU's "
            f"{size(self.total_bytes)}"
        )


class WarmUp(TrainerCallback):
    """Runs the trial when the model is ready, ends the start at the first step, and reports later recompilations."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._num_graphs = trainer, 0
        self.trial: Trial | None = None
        """None until a trial has run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.collator.pads_to_blocks and state.global_step < state.max_steps:
            startup, compile_cache = self._trainer.startup, self._trainer.compile_cache
            if compile_cache:
                with startup.timed("load compiled code"):
                    compile_cache.load()
            self.trial = run_trial(self._trainer, startup)
            if compile_cache:
                with startup.timed("keep compiled code"):
                    compile_cache.save()
            startup.notify(self.trial.text())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.startup.end()
        self._num_graphs = num_compiled_graphs() - self._trainer.compiled_apart

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.collator.pads_to_blocks and (
            new := num_compiled_graphs() - self._trainer.compiled_apart - self._num_graphs
        ):
            self._trainer.startup.notify(
                f"step {state.global_step} triggered {count(new, 'recompilation')}, which slowed it down: its inputs "
                "differ from those of the warm-up"
            )


def run_trial(trainer: Any, startup: Startup) -> Trial:
    """Run the longest pack forward and backward, capture CUDA graphs if possible, and validate on the longest pack.

    Gradients are dropped. All ranks run the same packs, because they gather sharded weights together.

    Raises:
        TrainingError: the GPU is out of memory; says what to lower.
    """
    with startup.timed("find shapes of packs"):
        packs = packs_by_shape(*trainer.upcoming(trainer.state.global_step, trainer.state.max_steps))
    longest, shortest = list(packs.values())[0], list(packs.values())[-1]
    num_tokens = longest.micro_batch.pack.num_tokens
    torch.cuda.reset_peak_memory_stats()
    with torch.random.fork_rng(devices=[trainer.args.device]):
        try:
            with startup.timed(COMPILE):
                trained = _run(trainer, longest)
                _run(trainer, shortest)  # a second length makes torch.compile compile for all lengths
                torch.cuda.synchronize()
            launched = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            if trainer.captured:
                with startup.timed(CAPTURE):
                    _capture(trainer, packs)
            if trainer.first_pack:
                with startup.timed("check packs"):
                    startup.notify(trainer.first_pack.check(trainer.model_wrapped))
                trainer.first_pack = None
            with startup.timed("try validation"):
                _validate(trainer)
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            raise TrainingError(trainer.out_of_memory(num_tokens)) from None
    # Nothing was freed since `empty_cache`, so the memory reserved now is the most that capturing needed.
    gradients = sum(weight.nbytes for weight in trained) if trainer.captured else 0  # beside those of captured passes
    # The optimizer will add two numbers per weight, as Adam keeps, unless it has allocated them.
    of_optimizer = 0 if trainer.optimizer.state else 2 * sum(weight.nbytes for weight in trained)
    peak = max(launched, torch.cuda.memory_reserved()) + gradients + of_optimizer
    total = torch.cuda.get_device_properties(trainer.args.device).total_memory
    num_shapes, seconds = len(packs) if trainer.captured else 0, startup.seconds
    return Trial(num_tokens, seconds[COMPILE], num_shapes, seconds.get(CAPTURE, 0.0), peak, total)


def _capture(trainer: Any, packs: dict[Shape, PackIndices]) -> None:
    """Capture passes: those of the largest shapes, or of all."""
    like = next((indices for shape, indices in packs.items() if shape[-1]), next(iter(packs.values())))
    shapes = list(packs) if trainer.captures_all else largest(packs)
    assert trainer.passes
    trainer.passes.prepare(trainer.model_wrapped, shapes, trainer.batch_of(like))
    torch.cuda.synchronize()


def largest(shapes: Iterable[Shape]) -> list[Shape]:
    """The shape with the most tokens, which is the first, and that with the most targets."""
    shapes = list(shapes)
    return list(dict.fromkeys([shapes[0], max(shapes, key=lambda shape: shape[1])]))


def packs_by_shape(
    packs: Iterable[PackIndices], examples: Sequence[Example] | Mapping[int, Example]
) -> dict[Shape, PackIndices]:
    """One of some packs for each shape; those with the most tokens first."""
    longest_first = sorted(packs, key=lambda indices: -indices.micro_batch.pack.num_tokens)
    of_shape: dict[Shape, PackIndices] = {}
    for indices in longest_first:
        chosen = [examples[index] for index in indices]
        num_targets, has_images = sum(each.num_targets for each in chosen), any(each.image_keys for each in chosen)
        of_shape.setdefault(shape_of(indices.micro_batch.pack.num_tokens, num_targets, has_images), indices)
    return of_shape


def _run(trainer: Any, indices: PackIndices) -> list[torch.Tensor]:
    """Run a pack forward and backward; returns the weights that got gradients, which are dropped."""
    model: Any = trainer.model_wrapped  # as in training: with autocast and on all ranks
    model.train()
    with trainer.accelerator.no_sync(model):
        trainer.forward_backward(model, trainer.batch_of(indices))
    trained = [weight for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    if trainer.passes:
        trainer.passes.needs_average = False
    return trained


def _validate(trainer: Any) -> None:
    """Run the longest pack of the validation, which needs memory beside the captured passes."""
    if (sampler := trainer.eval_sampler) is not None:
        longest = max(sampler.plan.upcoming(0, 1), key=lambda micro_batch: micro_batch.pack.num_tokens)
        [indices] = sampler.step_of([longest])
        model: Any = trainer.model
        model.eval()
        trainer.validation_loss(trainer.eval_batch_of(indices))
        if is_sharded(model):
            model.reshard()
