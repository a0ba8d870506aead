"""Trainer's settings from the run file.

Design: what cannot work is refused here, before anything is read. Trainer's trackers are not set here: they are
callbacks that a training adds (tracking), so that a measurement of training never tracks. Neither is the number of
checkpoints: RunTrainer deletes old ones itself (checkpoints.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from lookonce.errors import UsageError
from lookonce.run.config import RunFile
from lookonce.text import first_line
from lookonce.train.loop.scheduler import check_scheduler
from lookonce.train.loop.tracking.trackers import check_trackers
from lookonce.train.model.frozen.choice import check_run

FOLLOW_LOSS = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
"""Learning rate schedules that depend on what is measured while training."""
TF32_CAPABILITY = (8, 0)
"""CUDA capability of the first GPUs with TensorFloat-32 (Ampere)."""


def training_arguments(run: RunFile, folder: Path, **overrides: Any) -> TrainingArguments:
    """Trainer's settings for a run; checkpoints go to `folder`.

    Raises:
        UsageError: hardware or a library that the settings need is missing, or Trainer does not know a name.
    """
    check_trackers(run.train.track)
    check_run(run)
    options, on_gpu = run.train, torch.cuda.is_available()
    if options.precision == "fp16" and not on_gpu:
        raise UsageError("train.precision: fp16 needs a GPU, and this machine has none; use bf16 or fp32")
    check_scheduler(options)
    if options.best == "exact_match" and options.scheduler in FOLLOW_LOSS:
        raise UsageError(
            f"train.scheduler: {options.scheduler} follows the validation loss, and Trainer has one measure for it and "
            "for the best checkpoint; set train.best: loss, or another train.scheduler"
        )
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": options.epochs,
        "max_steps": options.steps or -1,
        "learning_rate": options.learning_rate,
        "lr_scheduler_type": options.scheduler,
        "lr_scheduler_kwargs": dict(options.scheduler_args),
        "warmup_steps": options.warmup,
        "optim": options.optimizer,
        "weight_decay": options.weight_decay,
        "max_grad_norm": options.max_grad_norm,
        "bf16": options.precision == "bf16",
        "fp16": options.precision == "fp16",
        "tf32": options.tf32 if on_gpu and torch.cuda.get_device_capability() >= TF32_CAPABILITY else None,
        "use_cpu": not on_gpu,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "logging_steps": options.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no" if not run.data.val else "epoch" if options.eval_steps is None else "steps",
        "eval_steps": options.eval_steps,
        "save_strategy": "epoch" if options.save_steps is None else "steps",
        "save_steps": options.save_steps or 500,
        "load_best_model_at_end": options.best == "loss",
        "metric_for_best_model": options.best,
        "seed": options.seed,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "prediction_loss_only": True,
    }
    try:
        arguments = TrainingArguments(**settings | overrides)
    except ValueError as error:
        raise UsageError(f"the `train` section is not valid: {first_line(error)}") from None
    if options.best == "exact_match" and "load_best_model_at_end" not in overrides:
        arguments.load_best_model_at_end = True  # Trainer itself would compare `save_steps` with `eval_steps`
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else Trainer uses DataParallel, which splits batches; features have no batch dimension
    return arguments
