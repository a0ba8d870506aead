"""The weights of a merged model: what an adapter changes of a checkpoint's tensors, and the files that are written.

Design: PEFT builds its layers around the empty model, so targets, scales and the names of tensors are its own.
transformers' own rules turn the names of a checkpoint into those of the model, so no name is known here but those of
experts. Their matrices are in one tensor, as in the model or transposed, or each in a tensor of its own; these are
transformers' `WeightConverter`s of mixtures of experts. Another layout is refused where it is changed. Every tensor of
the adapter must be used, so what is not known here (DoRA, biases) is an error.

Each file of the checkpoint gives one file of the same name with the same tensors. A tensor that no change concerns is
copied byte for byte, and a file without a change as a whole. The others are read in blocks of rows, computed in float32
and rounded once, in some ten megabytes of memory whatever the size of a tensor; mapped pages would count as this
process's memory. Tensors of larger values come first, as safetensors sorts them, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftConfig, get_peft_model
from peft.tuners.lora import layer as lora
from peft.utils.other import ModulesToSaveWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lookonce.cache.format import PARSE_ERRORS, read_header
from lookonce.cache.model.model_folder import empty_model
from lookonce.cache.store.fingerprint import raw_bytes
from lookonce.errors import ModelError, explain_os_error
from lookonce.files import atomic_write
from lookonce.text import listed

BLOCK_BYTES = 1 << 22
"""What is copied at once."""
BLOCK_VALUES = 1 << 20
"""The numbers that are computed at once."""
FLOATING = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""The types of numbers that LoRA can be added to, by their names in a header."""
CODES = {dtype: code for code, dtype in FLOATING.items()}
METADATA = "__metadata__"
EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
"""The name of a matrix of one expert. The model has all gates and up projections in one tensor, one above the other."""
WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"
"""PEFT's name of the adapter in the model."""

Shape = tuple[int, ...]
Progress = Callable[[int], object]
"""Is given a number of bytes that were written."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, or one to be written."""

    name: str
    code: str
    """The name of its type in the header."""
    shape: Shape
    num_bytes: int
    offset: int = 0
    """Where its bytes begin in the file."""

    @property
    def value_bytes(self) -> int:
        return self.num_bytes // max(math.prod(self.shape), 1)


class TensorFile:
    """A safetensors file, of which parts are read."""

    def __init__(self, path: Path) -> None:
        """Read the header; raises ModelError if the file cannot be read, or is not whole."""
        self.path = path
        try:
            header, start = read_header(path)
            self.metadata: dict[str, str] = header.pop(METADATA, {})
            tensors = [_stored(name, about, start) for name, about in header.items()]
            size = path.stat().st_size
        except PermissionError as error:
            raise ModelError(explain_os_error(error)) from None
        except (OSError, *PARSE_ERRORS) as error:
            raise ModelError(f"cannot read {path}: {error!r}; copy or download it again") from None
        if size != (whole_size := max((tensor.offset + tensor.num_bytes for tensor in tensors), default=start)):
            raise ModelError(f"{path} has {size:,} of {whole_size:,} bytes; copy or download it again")
        self.tensors = {tensor.name: tensor for tensor in sorted(tensors, key=lambda tensor: tensor.offset)}
        """In the order of their bytes."""

    def read(self, tensor: Stored, start: int, num_bytes: int) -> torch.Tensor:
        """Some bytes of a tensor, uint8; raises ModelError if the file has become shorter."""
        content = np.fromfile(self.path, np.uint8, num_bytes, offset=tensor.offset + start)
        if len(content) != num_bytes:
            raise ModelError(f"{self.path} became shorter while it was read; run the same command again")
        return torch.from_numpy(content)


def _stored(name: str, about: Mapping[str, Any], start: int) -> Stored:
    begin, end = about["data_offsets"]
    return Stored(name, about["dtype"], tuple(about["shape"]), end - begin, start + begin)


def write_tensors(
    path: Path,
    tensors: Iterable[Stored],
    metadata: Mapping[str, str],
    content: Callable[[Stored], Iterable[torch.Tensor]],
) -> None:
    """Write a safetensors file atomically; `content` gives the values of a tensor in blocks."""
    tensors = sorted(tensors, key=lambda tensor: -tensor.value_bytes)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(_header(tensors, metadata))
        for tensor in tensors:
            written = sum(file.write(raw_bytes(block)) for block in content(tensor))
            assert written == tensor.num_bytes, tensor.name


def _header(tensors: Iterable[Stored], metadata: Mapping[str, str]) -> bytes:
    """The length of the JSON, then the JSON, padded with blanks to a multiple of 8 bytes."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        offsets = [end, end := end + tensor.num_bytes]
        header[tensor.name] = {"dtype": tensor.code, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


# Changes.


@dataclass(frozen=True)
class Change:
    """The new values of a tensor: the old ones plus `scale * left @ right`, or `left` itself if `right` is None."""

    left: torch.Tensor
    """`[matrices, rows, rank]`; without `right`, `[matrices, rows, columns]`"""
    right: torch.Tensor | None = None
    """`[matrices, rank, columns]`"""
    scale: float = 1.0

    def rows(self, matrix: int, first: int, old: torch.Tensor) -> torch.Tensor:
        """The new values of the rows of a matrix from `first` on; `old` has their old ones in float32."""
        left = self.left[matrix, first : first + len(old)].float()
        if self.right is None:
            return left
        return torch.addmm(old, left, self.right[matrix].float(), alpha=self.scale)


def matrices(shape: Shape) -> tuple[int, int, int]:
    """A shape as a number of matrices, their rows and columns; a vector is one matrix of one row."""
    num_matrices, num_rows, *columns = (*(1,) * (3 - len(shape)), *shape)
    return num_matrices, num_rows, math.prod(columns)


def tensor_change(change: Change, name: str, shape: Shape, parameter: str, whole: Shape) -> Change:
    """A tensor's change, given that of the parameter of shape `whole`; raises ModelError for other layouts."""
    if shape == whole:
        return change
    if (match := EXPERT.search(name)) and len(whole) == 3:
        expert, part = int(match[1]), match[2]
        num_rows = whole[1] if part == "down_proj" else whole[1] // 2
        first = num_rows if part == "up_proj" else 0
        if expert < whole[0] and shape == (num_rows, whole[2]):
            left = change.left[expert : expert + 1, first : first + num_rows]
            return replace(change, left=left, right=None if change.right is None else change.right[expert : expert + 1])
    if len(shape) == 3 and (shape[0], shape[2], shape[1]) == whole:
        if change.right is None:
            return Change(change.left.mT)
        return Change(change.right.mT, change.left.mT, change.scale)
    raise ModelError(
        f"{name} has the shape {list(shape)} and {parameter} of the model {list(whole)}, a layout that cannot be "
        "merged into; merge in memory with PEFT's merge_and_unload"
    )


def read_changes(model: Any, adapter: Path) -> dict[str, Change]:
    """The changes of an adapter, by the names of the model's parameters. `model` is empty, and PEFT's afterwards.

    Raises:
        ModelError: the adapter cannot be read, or has tensors that cannot be merged.
    """
    path = adapter / WEIGHTS
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error!r}; copy it again, or train again") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on tied embeddings, which are untied here
        wrapped = get_peft_model(model, PeftConfig.from_pretrained(str(adapter)), low_cpu_mem_usage=True)

    def take(name: str) -> torch.Tensor:
        if name not in weights:
            raise ModelError(f"{path} has no {name}; train the adapter again, or copy it again")
        return weights.pop(name)

    changes: dict[str, Change] = {}
    for name, module in wrapped.named_modules():
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if isinstance(module, ModulesToSaveWrapper):
            for parameter, _ in module.modules_to_save[ADAPTER].named_parameters():
                trained = take(f"{name}.{parameter}")
                changes[f"{plain}.{parameter}"] = Change(trained.reshape(matrices(tuple(trained.shape))))
        elif isinstance(module, lora.Embedding | lora.ParamWrapper | lora.Linear):
            pattern = "lora_embedding_{}" if isinstance(module, lora.Embedding) else "lora_{}.weight"
            factors = _factors(module, *(take(f"{name}.{pattern.format(part)}") for part in "AB"))
            changes[f"{plain}.{getattr(module, 'parameter_name', 'weight')}"] = Change(
                *factors, module.scaling[ADAPTER]
            )
    if unused := sorted(name for name in weights if not name.endswith(".base_layer.weight")):  # copies of embeddings
        raise ModelError(
            f"{path} has tensors that cannot be merged: {listed(unused, 3)}; merge in memory with PEFT's "
            "merge_and_unload"
        )
    return changes


def _factors(layer: Any, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two factors of a layer's change, for each matrix of its parameter.

    PEFT has those of experts in two matrices, `[experts * rank, in]` and `[out, rank * experts]`, as in
    `ParamWrapper.get_delta_weight` of PEFT 0.21.
    """
    if isinstance(layer, lora.Embedding):
        return down.T[None], up.T[None]
    if not isinstance(layer, lora.ParamWrapper):
        return up[None], down[None]
    down = down.view(layer.num_experts, -1, down.shape[-1])
    up = up.view(len(up), -1, layer.num_experts).permute(2, 0, 1)
    return (up, down) if layer._did_swap_in_out_features else (down.mT, up.mT)


# A merged model.


@dataclass
class Cost:
    """What was changed and what rounding cost, as sums of squares over all changed numbers."""

    num_tensors: int = 0
    change: float = 0.0
    rounding: float = 0.0

    @property
    def share(self) -> float:
        """The length of what rounding changed, as a share of what the adapter changes."""
        return math.sqrt(self.rounding / self.change) if self.change else 0.0


@dataclass(frozen=True)
class Planned:
    """A tensor of a merged model."""

    stored: Stored
    source: Stored
    """The tensor in the checkpoint that it is made from."""
    change: Change | None = None
    """None for a tensor that is copied."""


@dataclass(frozen=True)
class Plan:
    """All tensors of a merged model."""

    files: dict[str, list[Planned]]
    is_untied: bool = False
    """Whether tied embeddings have become two tensors."""

    @property
    def num_tensors(self) -> int:
        return sum(map(len, self.files.values()))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.stored.num_bytes for tensors in self.files.values() for tensor in tensors)


def plan_merge(config: Any, files: Sequence[Path], adapter: Path, dtype: torch.dtype) -> Plan:
    """The tensors of the merged model, given a checkpoint's configuration and files; changed ones get `dtype`.

    Raises:
        ModelError: the adapter cannot be merged, or the checkpoint lacks a tensor that changes, or has it in a form
            that cannot be merged into.
    """
    model = empty_model(config)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}
    tied = {name: other_name for name, other_name in model.all_tied_weights_keys.items() if name != other_name}
    tensors = {path.name: TensorFile(path).tensors for path in files}
    parameters = _parameter_names(model, [name for file_tensors in tensors.values() for name in file_tensors])
    changes = read_changes(model, adapter)
    differ = {name: other_name for name, other_name in tied.items() if {name, other_name} & changes.keys()}
    untied = {other_name: name for name, other_name in differ.items() if name not in parameters.values()}
    code = CODES[dtype]

    def planned(source: Stored, name: str, parameter: str) -> Planned:
        if (change := changes.get(parameter)) is None:
            return Planned(replace(source, name=name), source)
        if source.code not in FLOATING:
            raise ModelError(
                f"{source.name} is quantised ({source.code}), so nothing can be added to it; train on an unquantised "
                "model, with train.frozen: int8 or nf4 if memory is short, or load the adapter unmerged, with PEFT or "
                "vLLM"
            )
        stored = Stored(name, code, source.shape, math.prod(source.shape) * dtype.itemsize)
        return Planned(stored, source, tensor_change(change, source.name, source.shape, parameter, shapes[parameter]))

    plan: dict[str, list[Planned]] = {file: [] for file in tensors}
    for file, file_tensors in tensors.items():
        for name, source in file_tensors.items():
            plan[file].append(planned(source, name, parameters[name]))
            if untied_name := untied.get(parameters[name]):
                plan[file].append(planned(source, untied_name, untied_name))
    if absent := sorted(changes.keys() - {*parameters.values(), *untied.values()}):
        raise ModelError(
            f"the model's files have no tensor for {listed(absent, 3)}, which the adapter changes; copy or "
            "download the model again"
        )
    return Plan(plan, bool(differ))


def _parameter_names(model: Any, names: Iterable[str]) -> dict[str, str]:
    """The name of the model's parameter for each name in a checkpoint; unknown ones keep theirs."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    known = model.state_dict()
    return {name: rename_source_key(name, renamings, converters, model.base_model_prefix, known)[0] for name in names}


def write_file(source: Path, target: Path, tensors: Sequence[Planned], cost: Cost, progress: Progress) -> None:
    """Write a file of the merged model; adds to `cost`; raises ModelError if the source or a result is broken."""
    if all(tensor.change is None and tensor.stored == tensor.source for tensor in tensors):
        with atomic_write(target) as temporary:
            shutil.copyfile(source, temporary)
        progress(sum(tensor.stored.num_bytes for tensor in tensors))
        return
    file, by_name = TensorFile(source), {tensor.stored.name: tensor for tensor in tensors}

    def content(stored: Stored) -> Iterator[torch.Tensor]:
        planned = by_name[stored.name]
        change = planned.change
        for block in _copied(file, planned.source) if change is None else _changed(file, planned, change, cost):
            yield block
            progress(block.nbytes)

    write_tensors(target, [tensor.stored for tensor in tensors], file.metadata, content)


def _copied(file: TensorFile, tensor: Stored) -> Iterator[torch.Tensor]:
    for start in range(0, tensor.num_bytes, BLOCK_BYTES):
        yield file.read(tensor, start, min(BLOCK_BYTES, tensor.num_bytes - start))


def _changed(file: TensorFile, planned: Planned, change: Change, cost: Cost) -> Iterator[torch.Tensor]:
    """The new values of a tensor, some rows at a time, rounded; `cost` is added to."""
    source, dtype = planned.source, FLOATING[planned.stored.code]
    num_matrices, num_rows, num_columns = matrices(source.shape)
    row_bytes = num_columns * source.value_bytes
    step = max(BLOCK_VALUES // max(num_columns, 1), 1)
    for matrix in range(num_matrices):
        for first in range(0, num_rows, step):
            shape = min(step, num_rows - first), num_columns
            stored = file.read(source, (matrix * num_rows + first) * row_bytes, shape[0] * row_bytes)
            old = stored.view(FLOATING[source.code]).view(shape).float()
            new = change.rows(matrix, first, old)
            rounded = new.to(dtype)
            cost.change += float((new - old).square_().sum())
            cost.rounding += float((rounded.float() - new).square_().sum())
            if not math.isfinite(cost.change + cost.rounding):
                raise ModelError(
                    f"{planned.stored.name} would get values that are no finite numbers; the adapter or the model is "
                    "broken"
                )
            yield rounded
    cost.num_tensors += 1
