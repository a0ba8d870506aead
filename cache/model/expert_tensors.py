"""Which tensors of experts a model folder lacks, or holds with other shapes than its configuration needs.

Design: transformers joins the tensors of a layer's experts as it loads them. If some are missing or have other shapes,
it fails without their names, or names the joined tensor alone. So names and shapes are compared here, from the headers
of the files. A layer without any tensor of its experts is left to transformers, which names what it lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from lookonce.cache.model.model_folder import ModelFolder

Shape = tuple[int, ...]
ONE_EACH = re.compile(r"(.+\.mlp\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
"""The name of a tensor of one expert."""
JOINED = re.compile(r".+\.mlp\.experts\.(gate_up_proj|down_proj)")
"""The name of a tensor of all experts of a layer."""


def missing_expert_tensors(model_folder: ModelFolder, shapes: dict[str, Shape]) -> list[str]:
    """The names of tensors that only some experts of a layer have; `shapes` are those of all tensors of the folder."""
    return sorted(name for name in _of_each_expert(model_folder, shapes) if name not in shapes)


def misshapen_expert_tensors(model_folder: ModelFolder, shapes: dict[str, Shape]) -> list[tuple[str, Shape, Shape]]:
    """Name, shape and needed shape of the experts' tensors whose shapes do not follow from the configuration.

    Matrices of a tensor of all experts may be transposed, as they are in published files of Qwen3-VL.
    """
    wanted: dict[str, tuple[Shape, ...]] = {
        name: (shape,) for name, shape in _of_each_expert(model_folder, shapes).items()
    }
    for name in shapes:
        if found := JOINED.fullmatch(name):
            number, rows, columns = needed = _joined_shape(model_folder, found[1])
            wanted[name] = (needed, (number, columns, rows))
    return [
        (name, shapes[name], allowed[0])
        for name, allowed in sorted(wanted.items())
        if name in shapes and shapes[name] not in allowed
    ]


def _of_each_expert(model_folder: ModelFolder, shapes: dict[str, Shape]) -> dict[str, Shape]:
    """The tensors that each expert needs, of the layers in which some expert has one: names and shapes."""
    places = {found.groups() for name in shapes if (found := ONE_EACH.fullmatch(name))}
    return {
        f"{place}.{number}.{part}.weight": shape
        for place, named in sorted(places)
        for part, shape in _parts(model_folder, named)
        for number in range(_sizes(model_folder)[0])
    }


def _parts(model_folder: ModelFolder, named: str) -> Iterator[tuple[str, Shape]]:
    """The tensors of an expert that are joined with one of them, and their shapes."""
    _, hidden_size, size = _sizes(model_folder)
    if named == "down_proj":
        yield named, (hidden_size, size)
    else:
        yield from product(("gate_proj", "up_proj"), [(size, hidden_size)])


def _joined_shape(model_folder: ModelFolder, part: str) -> tuple[int, int, int]:
    number, hidden_size, size = _sizes(model_folder)
    return (number, hidden_size, size) if part == "down_proj" else (number, 2 * size, hidden_size)


def _sizes(model_folder: ModelFolder) -> tuple[int, int, int]:
    """The number of experts, the hidden size and the size of an expert."""
    text = model_folder.config.text_config
    return text.num_experts, text.hidden_size, text.moe_intermediate_size
