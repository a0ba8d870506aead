"""Merge the adapter of a run into its model: a model folder that any program loads like the original one.

Design: what could stop a merge is checked first: the run must be trained, its weights such that can be added to, and
the model the one that the run was trained on, by the hashes that a training records. Then all files are written into a
scratch folder beside the target, which gets its name last, so a folder DIR is complete. The next merge into the same
place removes what a killed one has left.

Configurations are copied byte for byte, unless the result has another type or untied embeddings; the index, unless its
sizes or names change. Weights in other formats would be those of the untuned model, so they are left out.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from lookonce.adapter.weights import WEIGHTS, Cost, Plan, plan_merge, write_file
from lookonce.cache.model.model_folder import weight_files
from lookonce.cache.store.claims import scratch_folders
from lookonce.disk_space import check_room
from lookonce.environment import limit_cpu_threads
from lookonce.errors import ModelError, UsageError
from lookonce.files import SCRATCH, flush, flush_files, read_json, scratch_folder, write_json
from lookonce.run.config import RunFile
from lookonce.run.folder import claimed_around
from lookonce.run.open import Needs, OpenRun, open_run
from lookonce.run.sections import UNQUANTISED
from lookonce.text import count, listed, shell, size

ROUNDED = ("int8", "nf4")
"""The kinds of `train.frozen` whose rounding an adapter has learned to live with."""
Dtype = Literal["bf16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COMMAND = ("lookonce", "adapter", "merge")
ADVICE = "Make room, or choose a DIR on another disk; then run the same command again"
PURPOSE = "merge"
"""Part of the names of scratch folders."""
RECORD = "lookonce-merge.json"
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")
"""How the names of other files of weights end, and of their indices."""
NOT_OF_MODEL = {".git", ".cache", "original", RECORD}
"""Names that are left out: what git and huggingface_hub keep, and a second copy of the weights."""
DTYPE_KEYS = ("dtype", "torch_dtype")

# What cannot be merged.


def check_frozen(run: RunFile, command: str, *, allows_unquantised: bool) -> None:
    """Raise UsageError if the adapter was trained on quantised weights; `command` is the one that was given."""
    frozen = run.train.frozen
    if frozen in ROUNDED and not allows_unquantised:
        raise UsageError(
            f"the adapter was trained on weights quantised to {frozen}, which cannot be stored merged. Merged into "
            f"the unquantised weights, it answers some questions differently. To merge anyway: {command} "
            "--onto-unquantised\n"
            f"Otherwise load the adapter unmerged, with PEFT, or train again with train.frozen: {UNQUANTISED}"
        )


def check_target(target: Path) -> None:
    """Check that nothing is there; raises UsageError if something is."""
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists, and a merge does not write into an existing folder; choose another DIR")


# The folder.


def other_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of a model beside its weights, and those that are left out; paths relative to the folder."""
    weights = {INDEX, *_read_json(folder / INDEX)["weight_map"].values()} if (folder / INDEX).exists() else {SINGLE}
    copied, left_out = [], []
    for path in sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file()):
        if NOT_OF_MODEL & {*path.parts}:
            left_out += [path] if path.parts[0] == "original" else []
        elif path.name.endswith(OTHER_WEIGHTS):
            left_out += [path] if str(path) not in weights else []
        else:
            copied.append(path)
    return copied, left_out


def copy_other_files(source: Path, folder: Path, plan: Plan, dtype: str | None) -> None:
    """Copy what is beside the weights of a model; with `dtype`, the configuration gets this type."""
    changed = {CONFIG: _configured(_read_json(source / CONFIG), dtype, is_untied=plan.is_untied)}
    if (source / INDEX).exists():
        changed[INDEX] = _indexed(_read_json(source / INDEX), plan)
    for path in {*other_files(source)[0], *map(Path, changed)}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        value = changed.get(str(path))
        if value is None or value == _read_json(source / path):  # its bytes stay as they are
            shutil.copyfile(source / path, folder / path)
        else:
            write_json(folder / path, value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json(path))
    except ValueError as error:
        raise ModelError(f"{path} is broken ({error}); copy or download it again") from None


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration, and those of its parts."""
    return [config, *(part for part in config.values() if isinstance(part, dict))]


def _configured(config: dict[str, Any], dtype: str | None, *, is_untied: bool) -> dict[str, Any]:
    """The configuration of the result: in another type, or with embeddings that are no longer tied."""
    if dtype:
        for part in _parts(config):
            part.update({key: dtype for key in DTYPE_KEYS if key in part})
        if not any(key in config for key in DTYPE_KEYS):
            config["dtype"] = dtype
    if is_untied:
        config["tie_word_embeddings"] = False
        for part in _parts(config):
            part.update({"tie_word_embeddings": False} if "tie_word_embeddings" in part else {})
    return config


def _indexed(index: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The index of the result, in the order of the model's own."""
    file_of = {tensor.stored.name: file for file, tensors in plan.files.items() for tensor in tensors}
    names = [name for name in dict.fromkeys((*index["weight_map"], *sorted(file_of))) if name in file_of]
    metadata = {**(index.get("metadata") or {}), "total_size": plan.num_bytes}
    return index | {"metadata": metadata, "weight_map": {name: file_of[name] for name in names}}


# A merge.


@dataclass(frozen=True)
class Merged:
    folder: Path
    dtype: Dtype
    """The type of the tensors that the adapter changes."""
    num_tensors: int
    num_changed: int
    size_bytes: int
    rounding: float
    """What rounding changed, as a share of what the adapter changes: a ratio of Frobenius norms."""
    is_untied: bool
    """Whether tied embeddings have become two tensors."""
    left_out: list[str]
    """Files of weights in other formats, which were not copied."""

    def text(self) -> str:
        untied = "; embeddings and output layer are two tensors now" if self.is_untied else ""
        left_out = [f"  left out    {listed(self.left_out)} (weights of the untuned model)"] if self.left_out else []
        return "\n".join(
            [
                f"merged model in {self.folder}: {size(self.size_bytes)}",
                f"  changed     {self.num_changed:,} of {count(self.num_tensors, 'tensor')}, in {self.dtype}{untied}",
                f"  rounding    {self.rounding:.2%} of what the adapter changes",
                *left_out,
            ]
        )


def merge(run_path: Path, target: Path, dtype: Dtype = "bf16", *, onto_unquantised: bool = False) -> Merged:
    """Merge the adapter of a trained run, by its folder or run file, into a new model folder.

    Raises:
        LookonceError: the run is not trained, its model has changed or is quantised, or the target exists.
    """
    check_target(target)
    command = shell(*COMMAND)
    needs = Needs(command, adapter=True, recorded=True, model="open")
    with claimed_around(target, command), open_run(run_path, needs) as opened:
        check_frozen(opened.run, shell(*COMMAND, run_path, target), allows_unquantised=onto_unquantised)
        return _merge(opened, target, dtype)


def _merge(opened: OpenRun, target: Path, dtype: Dtype) -> Merged:
    run, model, adapter = opened.run, opened.model_folder.folder, opened.folder.adapter
    if model.resolve() in target.resolve().parents:  # of which all files are copied
        raise UsageError(f"{target} is in the folder of the model, {model}; choose another DIR")
    identity = opened.model_identity() | {"cache": opened.fingerprint.sha256}
    opened.folder.check_inputs(identity)
    limit_cpu_threads(model)
    plan = plan_merge(opened.model_folder.config, weight_files(model), adapter, DTYPES[dtype])
    path, hashes = Path(run.model.path).expanduser(), opened.folder.read_trained().adapter
    made_from = identity | {  # without paths of this machine, since the folder may be published
        "model": path.name if path.is_dir() else run.model.path,
        "revision": run.model.revision,
        "run": opened.folder.folder.absolute().name,
        "adapter": hashes[WEIGHTS],
        "adapter_config": hashes["adapter_config.json"],
        "dtype": dtype,
    }
    parent, (copied, left_out) = target.absolute().parent, other_files(model)
    parent.mkdir(parents=True, exist_ok=True)
    for left in scratch_folders(parent):
        if left.name.startswith(SCRATCH + PURPOSE):
            shutil.rmtree(left)
    cost, other_bytes = Cost(), sum((model / path).stat().st_size for path in copied)
    check_room(parent, plan.num_bytes + other_bytes, f"{target}", ADVICE)
    with scratch_folder(parent, PURPOSE) as scratch:
        folder = scratch / target.name
        folder.mkdir()
        with tqdm(total=plan.num_bytes, desc="merge", unit="B", unit_scale=True, leave=False, disable=None) as bar:
            for file, planned in plan.files.items():
                write_file(model / file, folder / file, planned, cost, bar.update)
        copy_other_files(model, folder, plan, "float32" if dtype == "fp32" else None)
        write_json(folder / RECORD, {"made_from": made_from})
        flush_files(folder)
        check_target(target)
        os.rename(folder, target)
        flush(parent)
    return Merged(
        folder=target,
        dtype=dtype,
        num_tensors=plan.num_tensors,
        num_changed=cost.num_tensors,
        size_bytes=plan.num_bytes,
        rounding=cost.share,
        is_untied=plan.is_untied,
        left_out=list(map(str, left_out)),
    )
