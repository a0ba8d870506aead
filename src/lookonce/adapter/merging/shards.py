"""The files of weights of a merged model: which tensors change, and writing them one after another.

Design: each file of the checkpoint gives one file of the same name with the same tensors, so the index stays as it is.
A tensor that no change concerns is copied byte for byte, and a file without a change as a whole. The others are read in
blocks of rows, computed in float32 and rounded once. Only what PEFT's rule needs is in memory: some ten megabytes,
whatever the size of a tensor. What rounding costs is summed up on the way.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lookonce.adapter.merging.changes import Change
from lookonce.adapter.merging.files import FLOATING, Stored, TensorFile, as_bytes, write_tensors
from lookonce.adapter.merging.names import (
    Place,
    empty_model,
    matrices,
    parameter_names,
    place_of,
    shapes_of,
    tied_names,
)
from lookonce.errors import ModelError
from lookonce.files import atomic_write
from lookonce.text import listed

BLOCK_VALUES = 1 << 20
"""The numbers that are computed at once."""


@dataclass
class Cost:
    """What was changed and what rounding cost, as sums of squares over all changed numbers."""

    num_tensors: int = 0
    change: float = 0.0
    rounding: float = 0.0

    def add(self, other: Cost) -> None:
        self.num_tensors += other.num_tensors
        self.change += other.change
        self.rounding += other.rounding

    @property
    def share(self) -> float:
        """The length of what rounding changed, as a share of what the adapter changes."""
        return math.sqrt(self.rounding / self.change) if self.change else 0.0


@dataclass(frozen=True)
class Planned:
    """A tensor of a merged model."""

    stored: Stored
    source: str
    """The name of the tensor in the checkpoint that it is made from."""
    place: Place | None = None
    """The place of what changes; None for a tensor that is copied."""


@dataclass(frozen=True)
class Plan:
    """All tensors of a merged model."""

    files: dict[str, list[Planned]] = field(default_factory=dict)
    """The tensors of each file."""
    is_untied: bool = False
    """Whether tied embeddings have become two tensors."""

    @property
    def num_tensors(self) -> int:
        return sum(map(len, self.files.values()))

    def bytes_of(self, file: str) -> int:
        return sum(one.stored.num_bytes for one in self.files[file])


class Checkpoint:
    """The names, shapes and files of a checkpoint, and where its tensors belong in the model."""

    def __init__(self, config: Any, files: Sequence[Path]) -> None:
        self.model = empty_model(config)
        self.shapes, self.tied = shapes_of(self.model), tied_names(self.model)
        self.files: dict[str, dict[str, Stored]] = {}
        for path in files:
            with TensorFile(path) as file:
                self.files[path.name] = file.tensors
        names = [name for tensors in self.files.values() for name in tensors]
        self.parameters = parameter_names(self.model, names)

    def plan(self, changes: Mapping[str, Change], dtype: torch.dtype) -> Plan:
        """The tensors of the merged model; changed ones are written in `dtype`.

        Raises:
            ModelError: the checkpoint lacks a tensor that changes, or has it in a form that cannot be merged into.
        """
        differ = {own: other for own, other in self.tied.items() if {own, other} & changes.keys()}
        there = {*self.parameters.values()}
        untied = {other: own for own, other in differ.items() if own not in there}
        files = {file: list(self._planned(tensors, changes, untied, dtype)) for file, tensors in self.files.items()}
        done = {one.place.parameter for tensors in files.values() for one in tensors if one.place}
        if absent := sorted(changes.keys() - done):
            raise ModelError(
                f"the model's files have no tensor for {listed(absent, 3)}, which the adapter changes; copy or "
                "download the model again"
            )
        return Plan(files, bool(differ))

    def _planned(
        self,
        tensors: Mapping[str, Stored],
        changes: Mapping[str, Change],
        untied: Mapping[str, str],
        dtype: torch.dtype,
    ) -> Iterator[Planned]:
        for name, stored in tensors.items():
            parameter = self.parameters[name]
            yield self._one(stored, name, parameter, changes, dtype)
            if own := untied.get(parameter):
                again = Stored(own, stored.code, stored.shape, stored.num_bytes)
                yield self._one(again, name, own, changes, dtype)

    def _one(
        self, stored: Stored, source: str, parameter: str, changes: Mapping[str, Change], dtype: torch.dtype
    ) -> Planned:
        if parameter not in changes:
            return Planned(stored, source)
        if stored.code not in FLOATING:
            raise ModelError(
                f"{source} is quantised ({stored.code}), so nothing can be added to it; train on an unquantised model, "
                "with train.frozen: int8 or nf4 if memory is short, or load the adapter unmerged, with PEFT or vLLM"
            )
        return Planned(stored.in_type(dtype), source, place_of(source, stored.shape, parameter, self.shapes))


def write_file(
    source: Path,
    target: Path,
    planned: Sequence[Planned],
    changes: Mapping[str, Change],
    progress: Callable[[int], object],
) -> Cost:
    """Write one file of the merged model; `progress` gets numbers of bytes.

    Raises:
        ModelError: the source is broken, or a result is no finite number.
    """
    if not any(one.place for one in planned) and all(one.stored.name == one.source for one in planned):
        with atomic_write(target) as temporary:
            shutil.copyfile(source, temporary)
        progress(sum(one.stored.num_bytes for one in planned))
        return Cost()
    cost, by_name = Cost(), {one.stored.name: one for one in planned}
    with TensorFile(source) as file:

        def content(stored: Stored) -> Iterator[bytearray | memoryview]:
            one = by_name[stored.name]
            for block in _merged(file, one, changes, cost) if one.place else file.blocks(one.source):
                yield block
                progress(len(block))

        write_tensors(target, [one.stored for one in planned], file.metadata, content)
    return cost


def _merged(file: TensorFile, one: Planned, changes: Mapping[str, Change], cost: Cost) -> Iterator[memoryview]:
    """The bytes of a changed tensor, some rows at a time."""
    num_matrices, num_rows, num_columns = matrices(one.stored.shape)
    step = max(BLOCK_VALUES // max(num_columns, 1), 1)
    for matrix in range(num_matrices):
        for first in range(0, num_rows, step):
            shape = min(step, num_rows - first), num_columns
            old = file.read(one.source, (matrix * num_rows + first) * num_columns, math.prod(shape)).view(shape)
            yield as_bytes(_changed(one, changes, cost, matrix, first, old.float()))
    cost.num_tensors += 1


def _changed(
    one: Planned, changes: Mapping[str, Change], cost: Cost, matrix: int, first: int, old: torch.Tensor
) -> torch.Tensor:
    """The new values of some rows, rounded."""
    assert one.place
    new = changes[one.place.parameter](one.place, matrix, first, old)
    rounded = new.to(FLOATING[one.stored.code])
    cost.change += float((new - old).square_().sum())
    cost.rounding += float((rounded.float() - new).square_().sum())
    if not math.isfinite(cost.change + cost.rounding):
        raise ModelError(
            f"{one.stored.name} would get values that are no finite numbers; the adapter or the model is broken"
        )
    return rounded
