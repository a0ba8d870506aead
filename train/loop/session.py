"""The trainer of an open run, and what to do if the model does not fit the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import TrainingArguments

from lookonce.environment import gpu_gb
from lookonce.errors import TrainingError
from lookonce.run.config import RunFile
from lookonce.run.open import OpenRun
from lookonce.run.startup import Startup
from lookonce.text import Notify, quiet
from lookonce.train.data.batches import FeatureSource
from lookonce.train.data.dataset import PackBatchSampler, VQADataset
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.log_files import STOCK_PRINTERS
from lookonce.train.loop.rewards import Draw, RewardTrainer
from lookonce.train.loop.trainer import PackTrainer
from lookonce.train.model.compile import CompileCache
from lookonce.train.model.gpu_memory import hint, measured_name


def compile_cache(opened: OpenRun, notify: Notify) -> CompileCache:
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
    draw: Draw | None = None,
) -> PackTrainer:
    """A trainer of a model on examples, which validates on `held_out` and prints nothing by itself.

    Features come from the run's cache, or from `source`. `startup` times this and the warm-up. With `draw` the examples
    are questions, and it learns from the rewards of answers to them.
    """
    options, startup = opened.run, startup or Startup(quiet)
    features, ranks = source or opened.features, (arguments.process_index, arguments.world_size)
    with startup.timed("group records"):
        dataset = VQADataset.of(examples, opened.chat_tokenizer, features, opened.variants)
        sampler = PackBatchSampler.of(dataset, options.batch, options.train.seed, *ranks)
    kind = partial(RewardTrainer, options=options.grpo, draw=draw) if draw else PackTrainer
    with startup.timed("move weights to the device"):
        trainer = kind(
            model,
            arguments,
            sampler,
            eval_dataset=VQADataset.of(held_out, opened.chat_tokenizer, features) if held_out else None,
            callbacks=callbacks,
            compiled=options.train.compile,
            captured=options.train.cuda_graphs,
            flex=options.train.flex_attention,
            checkpointing=options.train.gradient_checkpointing,
        )
    trainer.startup, trainer.compile_cache = startup, compile_cache(opened, startup.notify)
    trainer.memory_hint = memory_hint(options, model.config)
    for printer in STOCK_PRINTERS:
        trainer.remove_callback(printer)
    return trainer


@contextlib.contextmanager
def weights_fit(run: RunFile, model_config: Any) -> Iterator[None]:
    """Raise a TrainingError that says what to change if the model's weights are too large for the GPU."""
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
