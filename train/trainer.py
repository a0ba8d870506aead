"""transformers' Trainer, set up from the run file.

Design: Trainer does what it does for everybody (loop, checkpoints, resume, mixed precision, several GPUs); three
things are given to it through its own hooks. The loss is the sum over supervised tokens divided by their number in
the whole optimizer step, over all accumulation steps and ranks, so that it does not depend on how a step is cut. Time
spent waiting for batches is measured. And batches come from `Collator`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from lookonce.errors import UsageError
from lookonce.train.batch import IGNORED, Collator
from lookonce.train.prompt import Example
from lookonce.train.run_file import RunFile


class RunTrainer(Trainer):
    """Trainer that knows how long it has waited for batches."""

    def __init__(
        self,
        model: Any,
        arguments: TrainingArguments,
        collator: Collator,
        train_examples: Sequence[Example],
        eval_examples: Sequence[Example] = (),
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.wait_seconds = 0.0
        super().__init__(
            model=model,
            args=arguments,
            data_collator=collator,
            train_dataset=train_examples,
            eval_dataset=eval_examples or None,
            compute_loss_func=token_mean_loss,
            callbacks=list(callbacks),
        )

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """All batches of one optimizer step; Trainer's hook, timed."""
        start = time.perf_counter()
        samples = super().get_batch_samples(*args, **kwargs)
        self.wait_seconds += time.perf_counter() - start
        return samples


def token_mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The sum of the cross-entropies of `labels[:, 1:]` over `outputs.logits`, in float32, by `num_items_in_batch`.

    `outputs.logits` is `[B, K, vocabulary]`, `labels` `[B, 1 + K]`, as `Collator` makes them. `num_items_in_batch` is
    the number of supervised tokens of the whole optimizer step; without it, that of these labels.
    """
    targets = labels[:, 1:]
    chosen = targets != IGNORED
    total = cross_entropy(outputs.logits[chosen].float(), targets[chosen], reduction="sum")
    return total / (chosen.sum() if num_items_in_batch is None else num_items_in_batch)


def training_arguments(run: RunFile, folder: Path, **overrides: Any) -> TrainingArguments:
    """Trainer's own settings for a run; checkpoints go to `folder`.

    Raises:
        UsageError: the batch sizes do not divide, or the precision needs another machine.
    """
    options, on_gpu = run.train, torch.cuda.is_available()
    if options.precision == "fp16" and not on_gpu:
        raise UsageError("train.precision: fp16 needs a GPU, and there is none here; use bf16 or fp32")
    checkpointing = (
        "activation_checkpointing"
        if hasattr(TrainingArguments, "activation_checkpointing")
        else "gradient_checkpointing"
    )
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": run.batch.samples_per_forward,
        "per_device_eval_batch_size": run.batch.samples_per_forward,
        "gradient_accumulation_steps": accumulation_steps(run),
        "num_train_epochs": options.epochs,
        "max_steps": options.steps or -1,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": options.scheduler,
        "warmup_steps": options.warmup,
        "optim": options.optimizer,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "bf16": options.precision == "bf16",
        "fp16": options.precision == "fp16",
        "tf32": options.tf32 if on_gpu else None,
        "use_cpu": not on_gpu,
        checkpointing: options.gradient_checkpointing,
        "dataloader_num_workers": options.loader_workers,
        "dataloader_prefetch_factor": options.prefetch if options.loader_workers else None,
        "dataloader_persistent_workers": options.loader_workers > 0,
        "dataloader_pin_memory": options.pin_memory and on_gpu,
        "accelerator_config": {"non_blocking": options.pin_memory and on_gpu},
        "train_sampling_strategy": "random" if run.batch.order == "random" else "sequential",
        "logging_steps": options.logging_steps,
        "logging_first_step": True,
        "eval_strategy": "no" if not run.data.val else "epoch" if options.eval_steps is None else "steps",
        "eval_steps": options.eval_steps,
        "save_strategy": "epoch" if options.save_steps is None else "steps",
        "save_steps": options.save_steps or 500,
        "save_total_limit": options.save_total_limit,
        "load_best_model_at_end": options.load_best_model_at_end and bool(run.data.val),
        "seed": options.seed,
        "report_to": "tensorboard" if options.tensorboard else "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "prediction_loss_only": True,
    }
    try:
        return TrainingArguments(**settings | overrides)
    except ValueError as error:
        raise UsageError(f"the `train` section does not fit together: {str(error).splitlines()[0]}") from None


def accumulation_steps(run: RunFile) -> int:
    """How many forward passes make one optimizer step on each rank.

    Raises:
        UsageError: samples_per_step is not a multiple of samples_per_forward times the number of ranks.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    together = run.batch.samples_per_forward * num_ranks
    if run.batch.samples_per_step % together:
        raise UsageError(
            f"batch.samples_per_step ({run.batch.samples_per_step}) must be a multiple of batch.samples_per_forward "
            f"({run.batch.samples_per_forward}) times the number of ranks ({num_ranks})"
        )
    return run.batch.samples_per_step // together
