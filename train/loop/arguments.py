"""Trainer's settings from the run file, and its learning rate schedule.

What cannot work is refused before anything is read or written. Trainer makes the schedule after the model is loaded, so
a few steps of it are tried here for one weight, as some errors appear only after the warm-up. `report_to` is not set: a
training adds the callbacks of its trackers (log_files.py), so that a measurement of training never tracks.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
from transformers.trainer_utils import SchedulerType

from lookonce.errors import UsageError
from lookonce.run.config import RunFile
from lookonce.run.folder import NUM_CHECKPOINTS
from lookonce.run.sections import TrainSection
from lookonce.signals import waiting_for_processes
from lookonce.text import first_line
from lookonce.train.loop.log_files import check_trackers
from lookonce.train.model.frozen import check_frozen

NUM_WARMUP, NUM_STEPS = 10, 1000
"""The length of the schedule that is tried; the real one is known once the records are read."""
OF_TRAINER = {"self", "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
"""Arguments that Trainer passes itself."""
FOLLOW_LOSS = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)
"""Learning rate schedules that depend on what is measured while training."""
TF32_CAPABILITY = (8, 0)
"""CUDA capability of the first GPUs with TensorFloat-32 (Ampere)."""


def check_scheduler(options: TrainSection) -> None:
    """Check `train.scheduler` and its arguments; raises UsageError if transformers cannot make the schedule."""
    name, arguments = options.scheduler, options.scheduler_args
    names = [kind.value for kind in SchedulerType]
    if name not in names:
        raise UsageError(f"`train.scheduler` {name!r} is unknown; allowed: {', '.join(names)}")
    allowed = _arguments_of(SchedulerType(name))
    unknown = [key for key in arguments if key not in allowed]
    try:
        if unknown:
            raise ValueError(f"unknown {', '.join(unknown)}")
        scheduler = _schedule(options, NUM_WARMUP, NUM_STEPS)
        for factor in getattr(scheduler, "lr_lambdas", ()):
            for step in (0, NUM_WARMUP, NUM_STEPS // 2, NUM_STEPS - 1, NUM_STEPS):
                factor(step)
    except (TypeError, ValueError, ArithmeticError) as error:
        reason = first_line(error).replace("lr_scheduler_kwargs", "train.scheduler_args")
        raise UsageError(
            f"`train.scheduler_args` {arguments} does not fit `train.scheduler: {name}`: {reason}; "
            f"allowed: {', '.join(allowed) or 'none'}"
        ) from None


def _arguments_of(kind: SchedulerType) -> list[str]:
    """The arguments that a schedule takes from the run file."""
    function: Any = TYPE_TO_SCHEDULER_FUNCTION[kind]
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):  # passes all to a class
        parameters = inspect.signature(type(function(_optimizer(1.0)))).parameters
    return [name for name in parameters if name not in OF_TRAINER]


def _schedule(options: TrainSection, num_warmup: int, num_steps: int) -> Any:
    optimizer, arguments = _optimizer(options.learning_rate), dict(options.scheduler_args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Trainer's own call gives the same warnings
        return get_scheduler(options.scheduler, optimizer, num_warmup, num_steps, arguments)


def _optimizer(learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=learning_rate)


def training_arguments(run: RunFile, folder: Path, **overrides: Any) -> TrainingArguments:
    """Trainer's settings for a run; checkpoints go to `folder`.

    Raises:
        UsageError: hardware or a library that the settings need is missing, or Trainer does not know a name.
    """
    check_trackers(run.train.track)
    check_frozen(run.train.frozen, "train.frozen")
    options, on_gpu = run.train, torch.cuda.is_available()
    if options.precision == "fp16" and not on_gpu:
        raise UsageError("train.precision: fp16 needs a GPU, and this machine has none; use bf16 or fp32")
    check_scheduler(options)
    if options.best == "metric" and options.scheduler in FOLLOW_LOSS:
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
        "max_grad_norm": options.max_grad_norm,
        "bf16": options.precision == "bf16",
        "fp16": options.precision == "fp16",
        "tf32": options.precision != "fp32"
        if on_gpu and torch.cuda.get_device_capability() >= TF32_CAPABILITY
        else None,
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
        "save_total_limit": NUM_CHECKPOINTS,
        "load_best_model_at_end": options.best == "loss",
        "metric_for_best_model": run.measure if options.best else None,
        "seed": options.seed,
        "report_to": "none",
        "run_name": run.output.name,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "prediction_loss_only": True,
    }
    try:
        with waiting_for_processes():  # which it joins
            arguments = TrainingArguments(**settings | overrides)
    except ValueError as error:
        raise UsageError(f"the `train` section is not valid: {first_line(error)}") from None
    if options.best == "metric" and "load_best_model_at_end" not in overrides:
        arguments.load_best_model_at_end = True  # Trainer itself would compare `save_steps` with `eval_steps`
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else Trainer uses DataParallel, which splits batches; features have no batch dimension
    return arguments
