"""A merged model: its files of weights, one after another, and the folder `DIR.partial`, which becomes DIR at the end.

Design: each file of the checkpoint gives one file of the same name with the same tensors, so the index stays as it is.
A tensor that no change concerns is copied byte for byte, and a file without a change as a whole. The others are read in
blocks of rows, computed in float32 and rounded once. Only what PEFT's rule needs is in memory: some ten megabytes,
whatever the size of a tensor. What rounding costs is summed up on the way.

A record in the folder says what the model is made of and which files of weights are complete, so the same command
continues after an interruption, and another adapter, model or type is refused. The record stays in the result. A claim
file keeps a second process away. Configurations are copied byte for byte, unless the result has another type or untied
embeddings; the index, unless its sizes or names change. Weights in other formats would be those of the untuned model,
so they are left out.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lookonce.adapter.weights import (
    FLOATING,
    Change,
    Place,
    Stored,
    TensorFile,
    empty_model,
    matrices,
    parameter_names,
    place_of,
    write_tensors,
)
from lookonce.cache.store.fingerprint import raw_bytes
from lookonce.claim_file import FolderClaim
from lookonce.differences import differences
from lookonce.errors import ModelError, UsageError
from lookonce.files import TEMPORARY_MARK, atomic_write, flush, read_json, read_object, write_json
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
        self.shapes = {name: tuple(one.shape) for name, one in self.model.named_parameters(remove_duplicate=False)}
        """The shape of each parameter; tied ones are among them by each of their names."""
        self.tied = {own: other for own, other in self.model.all_tied_weights_keys.items() if own != other}
        """For each parameter that the model ties to another, by its configuration, that other one."""
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
            yield raw_bytes(_changed(one, changes, cost, matrix, first, old.float()))
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


RECORD = "lookonce-merge.json"
CLAIM = "claim.json"
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""How the names of other files of weights end, and of their indices."""
NOT_OF_MODEL = {".git", ".cache", "original", RECORD}
"""Names that are left out: what git and huggingface_hub keep, and a second copy of the weights."""
DTYPE_KEYS = ("dtype", "torch_dtype")


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights, as the index names them.

    Raises:
        ModelError: the index is broken, or a file is missing.
    """
    names = [SINGLE]
    if (folder / INDEX).exists():
        names = sorted({*_read_json(folder / INDEX)["weight_map"].values()})
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise ModelError(f"{folder} has no {absent[0]}; copy or download the model again")
    return [folder / name for name in names]


def other_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a model beside its weights, and those that are left out; paths relative to the folder."""
    weights = {INDEX, *(path.name for path in weight_files(folder))}
    copied, left_out = [], []
    for path in sorted(one.relative_to(folder) for one in folder.rglob("*") if one.is_file()):
        if NOT_OF_MODEL & {*path.parts}:
            left_out += [path] if path.parts[0] == "original" else []
        elif path.name.endswith(OTHER_WEIGHTS):
            left_out += [path] if str(path) not in weights else []
        else:
            copied.append(path)
    return copied, left_out


class MergeFolder:
    """The folder in which a merged model is written; a context manager that claims it."""

    def __init__(self, target: Path, made_from: Mapping[str, Any]) -> None:
        """`made_from` is what the result follows from; it is recorded, and compared when a merge is continued."""
        self.target, self.made_from = target, dict(made_from)
        self.folder = target.with_name(f"{target.name}.partial")
        self._claim = FolderClaim(self.folder / CLAIM, "lookonce adapter merge")

    def __enter__(self) -> MergeFolder:
        """Claim the folder.

        Raises:
            UsageError: it holds something else, or another process uses it.
        """
        check_target(self.target)
        self._check_record()
        if used_by := self._claim.take():
            raise UsageError(f"{self.folder} is in use by {used_by}; wait until it has ended, or stop it")
        for leftover in self.folder.rglob(f"*{TEMPORARY_MARK}*"):
            leftover.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._claim.__exit__()

    @property
    def done(self) -> dict[str, Cost]:
        """The complete files of weights."""
        files = read_object(self.folder / RECORD).get("files", {})
        return {name: Cost(**cost) for name, cost in files.items() if (self.folder / name).is_file()}

    def note(self, file: str | None = None, cost: Cost | None = None) -> None:
        """Record that a file is complete; without one, what the model is made from."""
        files = self.done | ({file: cost} if file and cost else {})
        write_json(
            self.folder / RECORD,
            {"made_from": self.made_from, "files": {name: asdict(files[name]) for name in sorted(files)}},
        )

    def copy_others(self, source: Path, plan: Plan, dtype: str | None) -> None:
        """Copy what is beside the weights; with `dtype`, the configuration gets this type."""
        for path in other_files(source)[0]:
            if path == Path(CONFIG) and (dtype or plan.is_untied):
                write_json(self.folder / path, _config(_read_json(source / path), dtype, plan.is_untied))
            else:
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self.folder / path) as temporary:
                    shutil.copyfile(source / path, temporary)
        if (source / INDEX).exists():
            self._write_index(source, plan, is_same=not (dtype or plan.is_untied))

    def _write_index(self, source: Path, plan: Plan, *, is_same: bool) -> None:
        index = _read_json(source / INDEX)
        total = sum(map(plan.bytes_of, plan.files))
        names = {one.stored.name: file for file, tensors in plan.files.items() for one in tensors}
        weight_map = {name: names[name] for name in (*index["weight_map"], *sorted(names)) if name in names}
        metadata = {**(index.get("metadata") or {}), "total_size": total}
        if is_same and weight_map == index["weight_map"] and metadata == index.get("metadata"):
            with atomic_write(self.folder / INDEX) as temporary:
                shutil.copyfile(source / INDEX, temporary)
        else:
            write_json(self.folder / INDEX, index | {"metadata": metadata, "weight_map": weight_map})

    def finish(self) -> None:
        """Rename the folder to its target, after this process has released it.

        Raises:
            UsageError: the target exists by now.
        """
        for path in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            flush(path)
        check_target(self.target)
        os.rename(self.folder, self.target)
        flush(self.target.absolute().parent)

    def _check_record(self) -> None:
        if not self.folder.exists() or not any(path.name != CLAIM for path in self.folder.iterdir()):
            return
        recorded = read_object(self.folder / RECORD).get("made_from")
        if recorded is None:
            raise UsageError(f"{self.folder} exists and holds no unfinished merge; choose another DIR, or move it away")
        if found := differences(self.made_from, recorded):
            lines = [f"  {name}: this one {mine!r}, that one {theirs!r}" for name, mine, theirs in found]
            raise UsageError(
                "\n".join([f"{self.folder} holds an unfinished merge of something else, which differs in", *lines])
                + "\nchoose another DIR, or remove that folder"
            )


def check_target(target: Path) -> None:
    """Check that nothing is there.

    Raises:
        UsageError: something is.
    """
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists, and a merge writes into no existing folder; choose another DIR")


def check_outside(target: Path, model: Path) -> None:
    """Check that the target is not in the model's own folder, of which all files are copied.

    Raises:
        UsageError: it is.
    """
    if model.resolve() in target.resolve().parents:
        raise UsageError(f"{target} is in the folder of the model, {model}; choose another DIR")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = read_json(path)
        return value
    except ValueError as error:
        raise ModelError(f"{path} is broken ({error}); copy or download it again") from None


def _config(config: dict[str, Any], dtype: str | None, is_untied: bool) -> dict[str, Any]:
    """The configuration of the result: in another type, or with embeddings that are no longer tied."""
    parts: Sequence[dict[str, Any]] = [config, *(one for one in config.values() if isinstance(one, dict))]
    if dtype:
        for part in parts:
            part.update({key: dtype for key in DTYPE_KEYS if key in part})
        if not any(key in config for key in DTYPE_KEYS):
            config["dtype"] = dtype
    if is_untied:
        config["tie_word_embeddings"] = False
        for part in parts:
            part.update({"tie_word_embeddings": False} if "tie_word_embeddings" in part else {})
    return config
