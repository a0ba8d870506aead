"""Where the tensors of a checkpoint belong in transformers' model: published names, and several layouts of experts.

Design: names are turned by transformers' own rules, those by which it loads a checkpoint, so no name is known here but
those of experts. Their matrices are in one tensor, as in the model or transposed, or each in a tensor of its own; these
are transformers' `WeightConverter`s of mixtures of experts. What has another layout is refused where it is changed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lookonce.errors import ModelError

EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
"""The name of a matrix of one expert. The model has all gates and up projections in one tensor, one above the other."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """What part of a parameter of the model a tensor of a checkpoint is."""

    parameter: str
    expert: int | None = None
    """The number of the matrix, if it is one of several."""
    first_row: int = 0
    """Where it begins in that matrix."""
    is_transposed: bool = False
    """Whether each matrix has rows and columns swapped."""


def empty_model(config: Any) -> Any:
    """transformers' stock model of a configuration, on the meta device: names and shapes without values."""
    stock_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    with torch.device("meta"):
        return stock_class(config)


def shapes_of(model: Any) -> dict[str, Shape]:
    """The shape of each parameter of a model; tied ones are among them by each of their names."""
    return {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}


def tied_names(model: Any) -> dict[str, str]:
    """For each parameter that a model ties to another, by its configuration, that other one."""
    return {own: other for own, other in model.all_tied_weights_keys.items() if own != other}


def parameter_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The name of the model's parameter for each name in a checkpoint; unknown ones keep theirs."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = model.state_dict()
    return {name: rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0] for name in names}


def place_of(name: str, shape: Shape, parameter: str, shapes: Mapping[str, Shape]) -> Place:
    """The place of a checkpoint's tensor in a parameter of the model.

    Raises:
        ModelError: it fits in no known way.
    """
    whole = shapes[parameter]
    if shape == whole:
        return Place(parameter)
    if (found := EXPERT.search(name)) and len(whole) == 3:
        expert, part = int(found[1]), found[2]
        place = Place(parameter, expert, whole[1] // 2 if part == "up_proj" else 0)
        num_rows = whole[1] if part == "down_proj" else whole[1] // 2
        if expert < whole[0] and shape == (num_rows, whole[2]):
            return place
    if len(shape) == 3 and (shape[0], shape[2], shape[1]) == whole:
        return Place(parameter, is_transposed=True)
    raise ModelError(
        f"{name} has the shape {list(shape)} and {parameter} of the model {list(whole)}, a layout that cannot be "
        "merged into; merge in memory with PEFT's merge_and_unload"
    )


def matrices(shape: Shape) -> tuple[int, int, int]:
    """A shape as a number of matrices, their rows and columns; a vector is one matrix of one row."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    return shape[0], shape[1], math.prod(shape[2:])
