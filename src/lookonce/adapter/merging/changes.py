"""What an adapter changes: for each parameter of the model the low-rank product that is added, or its new values.

Design: PEFT builds its layers around the empty model, so targets, scales and the names of tensors are its own. No value
is in memory but the two factors of one parameter, a few megabytes; of their product a block of rows at a time. Sums are
computed in float32. Every tensor of the adapter must be used, so what is not known here (DoRA, biases) is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftConfig, get_peft_model
from peft.tuners.lora import layer as lora
from peft.utils.other import ModulesToSaveWrapper

from lookonce.adapter.merging.files import TensorFile
from lookonce.adapter.merging.names import Place, Shape, matrices
from lookonce.errors import ModelError
from lookonce.text import listed

WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"
"""PEFT's name of the adapter in the model."""
NUM_CACHED = 4
"""Parameters whose factors stay in memory, for checkpoints with a tensor for each expert."""


class Change(Protocol):
    """How a parameter of the model changes."""

    def __call__(self, place: Place, matrix: int, first: int, old: torch.Tensor) -> torch.Tensor:
        """The new rows of a checkpoint's tensor at `place`, from row `first` of a matrix on; `old` are float32."""
        ...


@dataclass(frozen=True)
class Factors:
    """A product of low rank for each matrix of a parameter: `scale * left @ right`."""

    left: torch.Tensor
    """`[matrices, rows, rank]`"""
    right: torch.Tensor
    """`[matrices, rank, columns]`"""
    scale: float


Read = Callable[[], Factors]


@dataclass(frozen=True)
class Added:
    """Adds a product of low rank."""

    read: Read

    def __call__(self, place: Place, matrix: int, first: int, old: torch.Tensor) -> torch.Tensor:
        factors = self.read()
        number = matrix if place.expert is None else place.expert
        left, right = factors.left[number], factors.right[number]
        if place.is_transposed:
            left, right = right.T, left.T
        first += place.first_row
        return torch.addmm(old, left[first : first + len(old)], right, alpha=factors.scale)


@dataclass(frozen=True)
class Replaced:
    """Replaces a parameter by what was trained in its place."""

    file: TensorFile
    name: str
    """Its name in the adapter."""
    shape: Shape

    def __call__(self, place: Place, matrix: int, first: int, old: torch.Tensor) -> torch.Tensor:
        number = matrix if place.expert is None else place.expert
        _, num_rows, num_columns = matrices(self.shape)
        start = number * num_rows * num_columns
        if place.is_transposed:
            whole = self.file.read(self.name, start, num_rows * num_columns).view(num_rows, num_columns)
            return whole.T[first : first + len(old)].float()
        first += place.first_row
        return self.file.read(self.name, start + first * num_columns, old.numel()).view_as(old).float()


def read_changes(model: Any, adapter: Path, file: TensorFile) -> dict[str, Change]:
    """The changes of an adapter, by the names of the model's parameters. `model` is empty, and PEFT's afterwards.

    Raises:
        ModelError: the adapter has tensors that cannot be merged.
    """
    config = PeftConfig.from_pretrained(str(adapter))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on tied embeddings, which are untied here
        wrapped = get_peft_model(model, config, low_cpu_mem_usage=True)
    changes: dict[str, Change] = {}
    unused = {name for name in file.tensors if not name.endswith(".base_layer.weight")}  # PEFT's copies of embeddings
    recent = lru_cache(maxsize=NUM_CACHED)(_called)
    for parameter, names, change in _found(wrapped, file, recent):
        if absent := [name for name in names if name not in file.tensors]:
            raise ModelError(f"{file.path} has no {absent[0]}; train the adapter again, or copy it again")
        changes[parameter] = change
        unused -= {*names}
    if unused:
        raise ModelError(
            f"{file.path} has tensors that cannot be merged: {listed(sorted(unused), 3)}; merge in memory with PEFT's "
            "merge_and_unload"
        )
    return changes


def _found(
    wrapped: Any, file: TensorFile, recent: Callable[[Read], Factors]
) -> Iterator[tuple[str, list[str], Change]]:
    """Each change with the name of its parameter, and the names of its tensors in the adapter."""
    for name, module in wrapped.named_modules():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if isinstance(module, ModulesToSaveWrapper):
            for own, trained in module.modules_to_save[ADAPTER].named_parameters():
                yield f"{plain}.{own}", [f"{name}.{own}"], Replaced(file, f"{name}.{own}", tuple(trained.shape))
        for kind, pattern, factors in KINDS:
            if isinstance(module, kind):
                names = [f"{name}.{pattern.format(part)}" for part in "AB"]
                read = partial(factors, file, names, module)
                yield f"{plain}.{getattr(module, 'parameter_name', 'weight')}", names, Added(partial(recent, read))


def _called(read: Read) -> Factors:
    return read()


def _matrix(file: TensorFile, name: str) -> torch.Tensor:
    return file.read(name).view(file.tensors[name].shape).float()


def _of_linear(file: TensorFile, names: list[str], layer: Any) -> Factors:
    down, up = (_matrix(file, name) for name in names)
    return Factors(up[None], down[None], layer.scaling[ADAPTER])


def _of_embedding(file: TensorFile, names: list[str], layer: Any) -> Factors:
    down, up = (_matrix(file, name) for name in names)
    return Factors(down.T[None], up.T[None], layer.scaling[ADAPTER])


def _of_experts(file: TensorFile, names: list[str], layer: Any) -> Factors:
    """The factors of each expert, which PEFT keeps in two matrices: `[experts * rank, in]` and `[out, rank * experts]`.

    As in `ParamWrapper.get_delta_weight` of PEFT 0.21.
    """
    down, up = (_matrix(file, name) for name in names)
    down = down.view(layer.num_experts, -1, down.shape[-1])
    up = up.view(len(up), -1, layer.num_experts).permute(2, 0, 1)
    left, right = (up, down) if layer._did_swap_in_out_features else (down.transpose(1, 2), up.transpose(1, 2))
    return Factors(left, right, layer.scaling[ADAPTER])


KINDS: tuple[tuple[type, str, Callable[[TensorFile, list[str], Any], Factors]], ...] = (
    (lora.Embedding, "lora_embedding_{}", _of_embedding),
    (lora.ParamWrapper, "lora_{}.weight", _of_experts),
    (lora.Linear, "lora_{}.weight", _of_linear),
)
"""PEFT's kinds of layers, with the names of their tensors in an adapter."""
