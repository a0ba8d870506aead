"""transformers' Trainer, set up from the run file.

Design: Trainer does what it does for everybody (loop, checkpoints, resume, mixed precision, several GPUs); some
things are given to it through its own hooks. The loss is the sum over supervised tokens divided by their number in
the whole optimizer step, so that it does not depend on how a step is cut into forward passes; the validation loss
likewise. Time spent waiting for batches is measured. Loader workers start anew each epoch: workers that persist draw
from the random state once less than those of a resumed run, which then drops out other units. One process, for now.
"""

from __future__ import annotations

import importlib.util
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

CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)
"""What TrainingArguments calls it; the second is transformers 5.17's name."""
TF32_CAPABILITY = (8, 0)
"""Of the first GPUs that have TensorFloat-32 (Ampere)."""


class RunTrainer(Trainer):
    """Trainer whose losses are means over tokens, and that knows how long it has waited for batches."""

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

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The validation loss: the mean over all supervised tokens, however they fall into batches.

        Trainer's own would be the mean of the batches' means, which changes with the batch size.
        """
        model: Any = self.model
        model.eval()
        total, count = torch.zeros((), device=self.args.device), 0
        for batch in self.get_eval_dataloader():
            inputs = self._prepare_inputs(batch)
            labels = inputs.pop("labels")
            with self.compute_loss_context_manager():
                total += token_mean_loss(model(**inputs), labels, 1)
            count += int((labels[:, 1:] != IGNORED).sum())
        metrics = {"eval_loss": float(total) / max(count, 1)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


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
        UsageError: the precision or a library needs what is not here, or a name is not one of Trainer's.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("training in several processes is not supported yet; start it without torchrun, on one GPU")
    if run.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("train.tensorboard needs tensorboard; install it with: pip install 'lookonce[track]'")
    options, on_gpu = run.train, torch.cuda.is_available()
    if options.precision == "fp16" and not on_gpu:
        raise UsageError("train.precision: fp16 needs a GPU, and there is none here; use bf16 or fp32")
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": run.batch.samples_per_forward,
        "per_device_eval_batch_size": run.batch.samples_per_forward,
        "gradient_accumulation_steps": run.batch.accumulation_steps,
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
        "tf32": options.tf32 if on_gpu and torch.cuda.get_device_capability() >= TF32_CAPABILITY else None,
        "use_cpu": not on_gpu,
        CHECKPOINTING: options.gradient_checkpointing,
        "dataloader_num_workers": options.loader_workers,
        "dataloader_prefetch_factor": options.prefetch if options.loader_workers else None,
        "dataloader_pin_memory": options.pin_memory and on_gpu,
        "accelerator_config": {"non_blocking": options.pin_memory and on_gpu},
        "train_sampling_strategy": "random" if run.batch.order == "random" else "sequential",
        "logging_steps": options.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no" if not run.data.val else "epoch" if options.eval_steps is None else "steps",
        "eval_steps": options.eval_steps,
        "save_strategy": "epoch" if options.save_steps is None else "steps",
        "save_steps": options.save_steps or 500,
        "save_total_limit": options.save_total_limit,
        "load_best_model_at_end": options.load_best_model_at_end,
        "seed": options.seed,
        "report_to": "tensorboard" if options.tensorboard else "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "prediction_loss_only": True,
    }
    try:
        arguments = TrainingArguments(**settings | overrides)
    except ValueError as error:
        raise UsageError(f"the `train` section does not fit together: {str(error).splitlines()[0]}") from None
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else Trainer cuts batches for DataParallel, and features have no batch dimension to cut
    return arguments
