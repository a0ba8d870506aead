"""Transformers' Trainer for an open run, and what to do if its model does not fit the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import TrainingArguments

from lookonce.environment import gpu_gb
from lookonce.errors import TrainingError
from lookonce.run.config import RunFile
from lookonce.run.open import OpenRun
from lookonce.run.sections.batch import BatchSection
from lookonce.run.startup import Startup
from lookonce.text import Notify, quiet
from lookonce.train.data.batches import BatchMaker, FeatureSource
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.metrics_log import STOCK_PRINTERS
from lookonce.train.loop.trainer import RunTrainer
from lookonce.train.loop.warmup import WarmUp
from lookonce.train.model.compile_cache import CompileCache
from lookonce.train.model.gpu_memory import hint, measured_name
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import text_model


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
            options.train.prefetch,
            callbacks,
            uses_graphs=can_capture(options, arguments, source) and not linear_layers(text_model(model)),
            uses_flex=options.train.flex_attention,
            num_checkpoints=options.train.save_total_limit,
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
