"""Trainer's own state in a checkpoint: read and compared with its form before Trainer reads it.

Design: the checksums of a checkpoint find damage, and not an author who wrote them too. Trainer hands the fields of the
file to a class, so a field too many, or a value of another type, would end as an error of Python somewhere later. So
each field has its form here; one that a later version of transformers adds may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerState

from lookonce.errors import RunFolderError
from lookonce.files import read_json
from lookonce.run.folder import AGAIN, STATE, step_of
from lookonce.text import shown

Form = tuple[Callable[[Any], bool], str]
"""Whether a value has the form, and the form in words."""


def _or_null(form: Form) -> Form:
    return (lambda value: value is None or form[0](value)), f"{form[1]} or null"


LOSSES = "losses"
"""Under this name in `stateful_callbacks`: the sums of losses so far, of the logged steps and of those since."""


def _has_losses(value: Any) -> bool:
    """Whether it is an object, whose losses have their form if it has any."""
    if not isinstance(value, dict) or LOSSES not in value:
        return isinstance(value, dict)
    losses, numbers = value[LOSSES], ("logged", "not_logged")
    return (
        isinstance(losses, dict)
        and losses.keys() == {"num_steps", "last_logged_step", *numbers}
        and all(type(losses[name]) is float for name in numbers)
        and all(COUNT[0](losses[name]) for name in losses.keys() - {*numbers})
    )


def _is_log(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, dict) for line in value)


COUNT: Form = ((lambda value: type(value) is int and 0 <= value < 1 << 63), "a whole number of 0 or more")
NUMBER: Form = ((lambda value: type(value) in (int, float) and 0 <= value < math.inf), "a number of 0 or more")
POSITIVE: Form = ((lambda value: type(value) in (int, float) and 1e-18 < value < 1e18), "a number above 0")
STEPS: Form = ((lambda value: COUNT[0](value) and value > 0), "a whole number above 0")
ANY_NUMBER: Form = ((lambda value: type(value) in (int, float)), "a number")
SWITCH: Form = ((lambda value: isinstance(value, bool)), "true or false")
TEXT: Form = ((lambda value: isinstance(value, str)), "a text")
OBJECT: Form = ((lambda value: isinstance(value, dict)), "an object")
FORMS: dict[str, Form] = {
    **{"global_step": STEPS, "max_steps": STEPS, "epoch": POSITIVE},
    **dict.fromkeys(("num_train_epochs", "num_input_tokens_seen"), COUNT),
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "total_flos"), NUMBER),
    **dict.fromkeys(("train_batch_size", "best_global_step"), _or_null(COUNT)),
    **dict.fromkeys(("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"), SWITCH),
    **dict.fromkeys(("best_model_checkpoint", "trial_name"), _or_null(TEXT)),
    **{"best_metric": _or_null(ANY_NUMBER), "log_history": (_is_log, "a list of objects")},
    **{"stateful_callbacks": (_has_losses, "an object, with numbers in its losses"), "trial_params": _or_null(OBJECT)},
}
NEEDED = ("global_step", "max_steps", "epoch")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """How far Trainer was, and how far it had to go, when it wrote a checkpoint.

    Raises:
        RunFolderError: Trainer cannot have written it; names the file and the field.
    """
    path = checkpoint / STATE
    try:
        state = read_json(path)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} is broken ({shown(repr(error))}); {AGAIN}") from None
    if wrong := _fault(state, step_of(checkpoint)):
        raise RunFolderError(f"{path} is broken: {wrong}; {AGAIN}")
    return dict(state)


def _fault(state: Any, step: int) -> str | None:
    """What Trainer cannot have written, in words; None if all fields have their form."""
    if not isinstance(state, dict):
        return f"it holds {shown(repr(state))}, expected an object"
    if absent := [name for name in NEEDED if name not in state]:
        return f"it lacks {absent[0]}"
    if unknown := sorted(state.keys() - {field.name for field in fields(TrainerState)}):
        return f"Trainer has no field {shown(repr(unknown[0]))}"
    for name in FORMS.keys() & state.keys():
        has_form, form = FORMS[name]
        if not has_form(state[name]):
            return f"{name} is {shown(repr(state[name]))}, expected {form}"
    return None if state["global_step"] == step else f"global_step is {state['global_step']}, expected {step}"
