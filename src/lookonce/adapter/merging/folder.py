"""The folder of a merged model while it is written: `DIR.partial`, which becomes DIR when all is done.

Design: a record in the folder says what the model is made of and which files of weights are complete, so the same
command continues after an interruption, and another adapter, model or type is refused. The record stays in the result.
A claim file keeps a second process away. Configurations are copied byte for byte, unless the result has another type or
untied embeddings; the index, unless its sizes or names change. Weights in other formats would be those of the untuned
model, so they are left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lookonce.adapter.merging.shards import Cost, Plan
from lookonce.claim_file import FolderClaim
from lookonce.differences import differences
from lookonce.errors import ModelError, UsageError
from lookonce.files import TEMPORARY_MARK, atomic_write, flush, read_json, read_object, write_json

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
        self.folder = partial_of(target)
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
        for path in (self.folder, *_folders(self.folder)):
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


def partial_of(target: Path) -> Path:
    """The folder in which a result is written until it is complete."""
    return target.with_name(f"{target.name}.partial")


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


def _folders(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_dir())


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
