"""What an adapter changes of a checkpoint: files of tensors, the places of tensors in the model, and the changes.

Design: safetensors files are read and written a block at a time, so that a file of any size needs no memory. Blocks are
read with `os.pread` and not through a memory map, whose pages would count as this process's memory. A file is written
header first, which is possible because the types and shapes of all tensors are known before. Tensors of larger values
come first, as the library sorts them, so that every tensor is aligned. A torn write leaves no file: it is written under
another name, flushed and renamed.

Names are turned by transformers' own rules, those by which it loads a checkpoint, so no name is known here but those of
experts. Their matrices are in one tensor, as in the model or transposed, or each in a tensor of its own; these are
transformers' `WeightConverter`s of mixtures of experts. What has another layout is refused where it is changed.

PEFT builds its layers around the empty model, so targets, scales and the names of tensors are its own. No value is in
memory but the two factors of one parameter, a few megabytes; of their product a block of rows at a time. Sums are
computed in float32. Every tensor of the adapter must be used, so what is not known here (DoRA, biases) is an error.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model
from peft.tuners.lora import layer as lora
from peft.utils.other import ModulesToSaveWrapper
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lookonce.cache.format import PARSE_ERRORS, read_header
from lookonce.errors import ModelError, explain_os_error
from lookonce.files import atomic_write
from lookonce.text import listed

BLOCK_BYTES = 1 << 22
"""What is copied at once."""
FLOATING = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""The types of numbers that LoRA can be added to, by their names in a header."""
CODES = {dtype: code for code, dtype in FLOATING.items()}
METADATA = "__metadata__"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, or one to be written."""

    name: str
    code: str
    """The name of its type in the header."""
    shape: tuple[int, ...]
    num_bytes: int
    offset: int = 0
    """Where its bytes begin in the file."""

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def value_bytes(self) -> int:
        return self.num_bytes // max(self.num_values, 1)

    def in_type(self, dtype: torch.dtype) -> Stored:
        """The same tensor with values of another type."""
        return Stored(self.name, CODES[dtype], self.shape, self.num_values * dtype.itemsize)


class TensorFile:
    """A safetensors file that is open for reading; a context manager."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelError: the file cannot be read, or is not whole.
        """
        self.path = path
        try:
            header, start = read_header(path)
            self.metadata: dict[str, str] = header.pop(METADATA, {})
            found = [_stored(name, about, start) for name, about in header.items()]
            self._descriptor = os.open(path, os.O_RDONLY)
        except PermissionError as error:
            raise ModelError(explain_os_error(error)) from None
        except (OSError, *PARSE_ERRORS) as error:
            raise ModelError(f"cannot read {path}: {error!r}; copy or download it again") from None
        self.tensors = {one.name: one for one in sorted(found, key=lambda one: one.offset)}
        """In the order of their bytes."""
        self._check_size(max((one.offset + one.num_bytes for one in found), default=start))

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _check_size(self, expected: int) -> None:
        if (size := os.fstat(self._descriptor).st_size) != expected:
            os.close(self._descriptor)
            raise ModelError(f"{self.path} has {size:,} of {expected:,} bytes; copy or download it again")

    def read(self, name: str, first: int = 0, num_values: int | None = None) -> torch.Tensor:
        """Some values of a tensor, flat, in the type in which they are stored; by default all.

        Raises:
            ModelError: they are no floating-point numbers, or the file ended.
        """
        one = self.tensors[name]
        num_values = one.num_values if num_values is None else num_values
        content = self._read(one.offset + first * one.value_bytes, num_values * one.value_bytes)
        return torch.frombuffer(content, dtype=FLOATING[one.code]) if content else torch.empty(0)

    def blocks(self, name: str) -> Iterator[bytearray]:
        """The bytes of a tensor."""
        one = self.tensors[name]
        for start in range(0, one.num_bytes, BLOCK_BYTES):
            yield self._read(one.offset + start, min(BLOCK_BYTES, one.num_bytes - start))

    def _read(self, offset: int, num_bytes: int) -> bytearray:
        content, done = bytearray(num_bytes), 0
        while done < num_bytes:
            got = os.preadv(self._descriptor, [memoryview(content)[done:]], offset + done)
            if not got:
                raise ModelError(f"{self.path} became shorter while it was read; run the same command again")
            done += got
        return content


def _stored(name: str, about: Mapping[str, Any], start: int) -> Stored:
    begin, end = about["data_offsets"]
    return Stored(name, about["dtype"], tuple(about["shape"]), end - begin, start + begin)


Content = Callable[[Stored], Iterable[bytes | bytearray | memoryview]]
"""The bytes of a tensor, in blocks."""


def write_tensors(path: Path, tensors: Sequence[Stored], metadata: Mapping[str, str], content: Content) -> None:
    """Write a safetensors file atomically, one block after another."""
    tensors = sorted(tensors, key=lambda one: -one.value_bytes)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(_header(tensors, metadata))
        for one in tensors:
            written = sum(file.write(block) for block in content(one))
            assert written == one.num_bytes, one.name


def _header(tensors: Iterable[Stored], metadata: Mapping[str, str]) -> bytes:
    """The length of the JSON, then the JSON, padded with blanks to a multiple of 8 bytes."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for one in tensors:
        header[one.name] = {
            "dtype": one.code,
            "shape": list(one.shape),
            "data_offsets": [end, end := end + one.num_bytes],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


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


WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"
"""PEFT's name of the adapter in the model."""
NUM_CACHED = 4
"""Parameters whose factors stay in memory, for checkpoints with a tensor for each expert."""


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
        """The new rows of a checkpoint's tensor at `place`, from row `first` of a matrix on; `old` are float32."""
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
        """The same as for `Added`."""
        number = matrix if place.expert is None else place.expert
        _, num_rows, num_columns = matrices(self.shape)
        start = number * num_rows * num_columns
        if place.is_transposed:
            whole = self.file.read(self.name, start, num_rows * num_columns).view(num_rows, num_columns)
            return whole.T[first : first + len(old)].float()
        first += place.first_row
        return self.file.read(self.name, start + first * num_columns, old.numel()).view_as(old).float()


Change = Added | Replaced
"""How a parameter of the model changes."""


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
    recent = lru_cache(maxsize=NUM_CACHED)(lambda read: read())
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
