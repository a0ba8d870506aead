"""The Trainer of an open run, its trial of the longest pack, and what to do if the model does not fit the GPU.

Design: the trial before training compiles the model and shows whether packs fit. Memory is measured and not computed,
since it depends on the model, the adapter, gradient checkpointing and the compiler. The trial costs a few passes;
compiling would take its time anyway. Later recompilations are unexpected and reported. Passes over the longest pack and
that with most targets are captured first, so that those of other shapes fit into their memory. These are captured when
a pack has their shape for the first time: of the 47 shapes of an epoch of Kvasir-VQA, the first step needs one and the
first 50 steps need 31, so training begins 12 seconds sooner.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from lookonce.environment import gpu_gb
from lookonce.errors import TrainingError
from lookonce.run.config import RunFile
from lookonce.run.folder import NUM_CHECKPOINTS
from lookonce.run.open import OpenRun
from lookonce.run.sections import BatchSection
from lookonce.run.startup import Startup
from lookonce.text import Notify, count, duration, quiet, size
from lookonce.train.data.batches import BatchMaker, FeatureSource
from lookonce.train.data.sampler import MicroBatch, Sampler
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.log_files import STOCK_PRINTERS
from lookonce.train.loop.trainer import RunTrainer
from lookonce.train.model.compile import CompileCache, num_compiled_graphs
from lookonce.train.model.cuda_graphs import Shape, shape_of
from lookonce.train.model.gpu_memory import hint, measured_name
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import is_sharded, text_model

PREFETCH = 2
"""Forward passes whose batches are prepared ahead, while the steps before them run."""
COMPILE, CAPTURE = "compile and warm up", "capture CUDA graphs"
"""What the two longest parts of a trial are called among the pieces of work before the first step."""


@dataclass(frozen=True)
class Trial:
    """The result of a trial."""

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
    """Runs the trial when the trainer's model is ready, ends the start at the first step, and reports recompilations in
    later steps."""

    def __init__(self, trainer: RunTrainer, startup: Startup, compile_cache: CompileCache) -> None:
        self._trainer, self._startup, self._compile_cache = trainer, startup, compile_cache
        self._num_graphs = 0
        self.trial: Trial | None = None
        """None until a trial has run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.batch_maker.pads_to_blocks and state.global_step < state.max_steps:
            with self._startup.timed("load compiled code"):
                self._compile_cache.load()
            self.trial = run_trial(self._trainer, self._startup)
            with self._startup.timed("keep compiled code"):
                self._compile_cache.save()
            self._startup.notify(self.trial.text())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._startup.end()
        self._num_graphs = num_compiled_graphs()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.batch_maker.pads_to_blocks and (new := num_compiled_graphs() - self._num_graphs):
            self._startup.notify(
                f"step {state.global_step} triggered {count(new, 'recompilation')}, which slowed it down: its inputs "
                "differ from those of the warm-up"
            )


def run_trial(trainer: RunTrainer, startup: Startup) -> Trial:
    """Run the longest pack forward and backward, capture CUDA graphs if possible, and validate on the longest pack.

    Gradients are dropped. All ranks run the same packs, because they gather sharded weights together.

    Raises:
        TrainingError: the GPU is out of memory; says what to lower.
    """
    with startup.timed("find shapes of packs"):
        packs = packs_by_shape(trainer.batch_maker.sampler, trainer.state.global_step, trainer.state.max_steps)
    longest, shortest = list(packs.values())[0], list(packs.values())[-1]
    num_tokens = longest.pack.num_tokens
    torch.cuda.reset_peak_memory_stats()
    with torch.random.fork_rng(devices=[trainer.batch_maker.device]):
        try:
            with startup.timed(COMPILE):
                trained = _run(trainer, longest)
                _run(trainer, shortest)  # a second length makes torch.compile compile for all lengths
                torch.cuda.synchronize()
            launched = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            if trainer.uses_graphs:
                with startup.timed(CAPTURE):
                    _capture(trainer, trained, packs)
            with startup.timed("try validation"):
                _validate(trainer)
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            raise TrainingError(trainer.out_of_memory(num_tokens)) from None
    # Nothing was freed since `empty_cache`, so the memory reserved now is the most that capturing needed.
    peak = max(launched, torch.cuda.memory_reserved()) + _bytes_of_optimizer(trainer, trained)
    total = torch.cuda.get_device_properties(trainer.batch_maker.device).total_memory
    num_shapes, seconds = len(packs) if trainer.uses_graphs else 0, startup.seconds
    return Trial(num_tokens, seconds[COMPILE], num_shapes, seconds.get(CAPTURE, 0.0), peak, total)


def _capture(trainer: RunTrainer, trained: list[torch.Tensor], packs: dict[Shape, MicroBatch]) -> None:
    """Capture passes from now on: at once those of the largest shapes, or of all."""
    with_images = next((micro_batch for shape, micro_batch in packs.items() if shape[-1]), next(iter(packs.values())))
    shapes = list(packs) if trainer.captures_all else largest(packs)
    trainer.capture_passes(trained, shapes, trainer.batch_maker.batch(with_images))
    torch.cuda.synchronize()


def largest(shapes: Iterable[Shape]) -> list[Shape]:
    """The shape with the most tokens, which is the first, and that with the most targets."""
    shapes = list(shapes)
    return list(dict.fromkeys([shapes[0], max(shapes, key=lambda shape: shape[1])]))


def packs_by_shape(sampler: Sampler, start: int, end: int) -> dict[Shape, MicroBatch]:
    """One of the upcoming micro-batches for each shape; those with the most tokens first."""
    longest_first = sorted(sampler.upcoming(start, end), key=lambda micro_batch: -micro_batch.pack.num_tokens)
    found: dict[Shape, MicroBatch] = {}
    for micro_batch in longest_first:
        has_images = any(sampler.examples[group.examples[0]].image_keys for group in micro_batch.pack.groups)
        found.setdefault(
            shape_of(micro_batch.pack.num_tokens, sampler.num_targets(micro_batch), has_images), micro_batch
        )
    return found


def _run(trainer: RunTrainer, micro_batch: MicroBatch) -> list[torch.Tensor]:
    """Run a micro-batch forward and backward; returns the weights that got gradients, which are dropped."""
    model: Any = trainer.model_wrapped  # as in training: with autocast and on all ranks
    model.train()
    with trainer.accelerator.no_sync(model):
        trainer.forward_backward(model, trainer.batch_maker.batch(micro_batch))
    trained = [weight for weight in model.parameters() if weight.grad is not None]
    model.zero_grad(set_to_none=True)
    return trained


def _validate(trainer: RunTrainer) -> None:
    """Run the longest pack of the validation, which needs memory beside the captured passes."""
    if batch_maker := trainer.eval_batch_maker:
        longest = max(batch_maker.sampler.upcoming(0, 1), key=lambda micro_batch: micro_batch.pack.num_tokens)
        model: Any = trainer.model
        model.eval()
        trainer.validation_loss(batch_maker.batch(longest))
        if is_sharded(model):
            model.reshard()


def _bytes_of_optimizer(trainer: RunTrainer, trained: list[torch.Tensor]) -> int:
    """Memory that the optimizer will add: two numbers per weight, as Adam keeps; 0 if it has allocated them."""
    optimizer: Any = trainer.optimizer
    return 0 if optimizer.state else 2 * sum(weight.nbytes for weight in trained)


def compile_cache(opened: OpenRun, notify: Notify) -> CompileCache:
    """The compiled code that is kept for the run's model."""
    return CompileCache(opened.run.compile_cache, opened.model_folder.folder / "config.json", notify)


def make_trainer(
    opened: OpenRun,
    model: Any,
    arguments: TrainingArguments,
    examples: Sequence[Example],
    held_out: Sequence[Example] = (),
    callbacks: Sequence[Any] = (),
    startup: Startup | None = None,
    source: FeatureSource | None = None,
) -> RunTrainer:
    """A trainer of a model on examples, which validates on `held_out` and prints nothing by itself.

    Features come from the run's cache, or from `source`. `startup` times this and the warm-up.
    """
    options, startup = opened.run, startup or Startup(quiet)
    source = source or opened.features
    one_step = options.batch.model_copy(update={"samples_per_step": max(len(held_out), 1), "order": "as_given"})
    ranks = {"rank": arguments.process_index, "num_ranks": arguments.world_size}

    def batch_maker(examples: Sequence[Example], batch: BatchSection) -> BatchMaker:
        return BatchMaker.of(
            examples, opened.chat_tokenizer, source, batch, arguments.device, options.train.seed, **ranks
        )

    with startup.timed("group records"):
        batches = batch_maker(examples, options.batch), batch_maker(held_out, one_step) if held_out else None
    with startup.timed("move weights to the device"):
        trainer = RunTrainer(
            model,
            arguments,
            *batches,
            PREFETCH,
            callbacks,
            uses_graphs=can_capture(options, arguments, source) and not linear_layers(text_model(model)),
            uses_flex=options.train.flex_attention,
            num_checkpoints=NUM_CHECKPOINTS,
            checkpointing=options.train.gradient_checkpointing,
            memory_hint=memory_hint(options, model.config),
        )
    for printer in STOCK_PRINTERS:
        trainer.remove_callback(printer)
    trainer.add_callback(WarmUp(trainer, startup, compile_cache(opened, startup.notify)))
    return trainer


@contextlib.contextmanager
def weights_fit(run: RunFile, model_config: Any) -> Iterator[None]:
    """Say what to change if the model's weights are too large for the GPU.

    Raises:
        TrainingError: it ran out of memory within the block.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise TrainingError(
            f"out of memory: the model's weights do not fit this GPU of {gpu_gb() or 0:.1f} GB; set train.frozen: nf4, "
            f"or int8, or train.fsdp on several GPUs{memory_hint(run, model_config)}"
        ) from None


def memory_hint(run: RunFile, model_config: Any) -> str:
    """What fits this GPU, as far as it was measured; for the end of a message."""
    name = measured_name(run.model.path, model_config) if run.batch.has_packs else None
    return hint(name, gpu_gb(), run.train.gradient_checkpointing, run.train.frozen, run.batch.tokens_per_pack)


def can_capture(run: RunFile, arguments: TrainingArguments, source: FeatureSource) -> bool:
    """Whether passes over packs can be captured as CUDA graphs: one shape is always the same work, on the GPU alone.

    This is not so with a tower, whose shapes depend on its images, nor with fp16 (loss scaling), sharded weights, and
    gradient checkpointing outside of compiled code (random states), which involve the CPU.
    """
    options, is_sharded = run.train, run.train.fsdp and arguments.world_size > 1
    keeps_random_states = options.gradient_checkpointing and not options.compile
    needs_cpu = source.has_tower or keeps_random_states or arguments.fp16 or is_sharded
    on_gpu = arguments.device.type == "cuda"
    return options.cuda_graphs and on_gpu and run.batch.has_packs and not needs_cpu
