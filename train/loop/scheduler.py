"""Check a learning rate schedule of transformers before anything is read or written.

Design: Trainer makes the schedule after the model is loaded and the run folder is claimed. So the same function
makes it here for one weight, and a few steps of it are computed, as some errors appear only after the warm-up.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
from transformers.trainer_utils import SchedulerType

from lookonce.errors import UsageError
from lookonce.run.config import TrainSection
from lookonce.text import first_line

NUM_WARMUP, NUM_STEPS = 10, 1000
"""The length of the schedule that is tried; the real one is known once the records are read."""
OF_TRAINER = {"self", "optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
"""Arguments that Trainer passes itself."""


def check_scheduler(options: TrainSection) -> None:
    """Check `train.scheduler` and `train.scheduler_args`.

    Raises:
        UsageError: transformers has no such schedule, or cannot make it with these arguments.
    """
    name, arguments = options.scheduler, options.scheduler_args
    names = [kind.value for kind in SchedulerType]
    if name not in names:
        raise UsageError(f"`train.scheduler` {name!r} is unknown; allowed: {', '.join(names)}")
    allowed = _arguments_of(SchedulerType(name))
    unknown = [key for key in arguments if key not in allowed]
    try:
        if unknown:
            raise ValueError(f"unknown {', '.join(unknown)}")
        _try(name, arguments, options.learning_rate)
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


def _try(name: str, arguments: dict[str, Any], learning_rate: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Trainer's own call gives the same warnings
        scheduler: Any = get_scheduler(name, _optimizer(learning_rate), NUM_WARMUP, NUM_STEPS, dict(arguments))
    for factor in getattr(scheduler, "lr_lambdas", ()):
        for step in (0, NUM_WARMUP, NUM_STEPS // 2, NUM_STEPS - 1, NUM_STEPS):
            factor(step)


def _optimizer(learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=learning_rate)
