"""The adapter of another run with whose weights a training starts (`train.start_from`).

Design: the weights alone are taken, so the other run must have the same language model and an adapter of the same
shape. The hash of the adapter belongs to the recorded inputs: a resumed training with another start is refused. Once it
is recorded, the other run need not exist any more, because checkpoints have the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lookonce.errors import ModelError, RunFolderError, UsageError
from lookonce.files import hash_file
from lookonce.run.config import RunFile
from lookonce.run.folder import RECORD, RunFolder
from lookonce.run.sections import SCHEME, LoraSection, hub_adapter
from lookonce.text import located, shell

SHAPE = ("rank", "alpha", "rslora", "targets", "experts", "modules_to_save")
"""Keys of `lora` that both runs must share; dropout may differ."""
MODEL = "language_model"
"""The recorded input that both runs must share."""


def find_start(run: RunFile) -> RunFolder | None:
    """The run folder of `train.start_from`; None for a training that starts with a new adapter.

    An adapter on the Hub is downloaded if it is not on this machine.

    Raises:
        RunFolderError: that run is not trained; names the command.
        ModelError: the adapter on the Hub is not available.
        UsageError: its adapter has another shape, or is not named at a commit; names the keys.
    """
    start = run.train.start_from
    if start is None:
        return None
    folder = folder_of(start, is_local=False)
    assert folder is not None
    if not folder.trained.exists():
        raise RunFolderError(_not_trained(start, folder))
    folder.check_adapter()
    if differing := shape_differences(run.lora, folder.read_run().lora):
        lines = [f"  {key}: this run {mine!r}, that one {theirs!r}" for key, mine, theirs in differing]
        raise UsageError(
            "\n".join([f"train.start_from: the adapter of {folder.folder} has another shape, which differs in", *lines])
            + "\ngive both runs the same section `lora`, apart from its dropout"
        )
    return folder


def folder_of(start: Path | str, *, is_local: bool = True) -> RunFolder | None:
    """The folder of a value of `train.start_from`; None if it is to be `is_local`, and an adapter on the Hub is not.

    Raises:
        ModelError: the adapter on the Hub is not available.
        UsageError: it is not named at a commit, and may be downloaded.
    """
    adapter = hub_adapter(start)
    if adapter is None:
        return RunFolder.find(Path(start))
    from lookonce.hub import find_adapter, is_commit  # cli.py sets the environment that huggingface_hub reads

    if not (is_local or is_commit(adapter.revision)):
        raise UsageError(
            f"train.start_from: {adapter} may change, because it names no commit; write {SCHEME}{adapter.name}@COMMIT, "
            "or let this write it: lookonce fetch RUN.yaml --pin"
        )
    try:
        pushed = find_adapter(adapter.name, adapter.revision, is_local=is_local)
    except ModelError:
        if is_local:
            return None
        raise
    return RunFolder(pushed, adapter=pushed)  # an upload has adapter and record in one folder


def _not_trained(path: Path | str, folder: RunFolder) -> str:
    if not isinstance(path, Path):
        return (
            f"train.start_from: {path} has no record of a run ({folder.trained.name} is missing); name an adapter that "
            "`lookonce adapter push` uploaded, or the output folder of a trained run"
        )
    if not path.is_file() and not (folder.folder / RECORD).exists():
        return f"train.start_from: {located(path)} is not a run folder; name the output folder of a trained run"
    train = shell("lookonce", "train", path if path.is_file() else folder.folder / "run.yaml", "--resume")
    return f"train.start_from: {folder.folder} is not trained yet; train it first: {train}"


def shape_differences(mine: LoraSection, theirs: LoraSection) -> list[tuple[str, Any, Any]]:
    """The keys in which the shapes of two adapters differ, each with both values; lists in any order are the same."""
    values = [(f"lora.{name}", getattr(mine, name), getattr(theirs, name)) for name in SHAPE]
    return [(key, first, second) for key, first, second in values if _sorted(first) != _sorted(second)]


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def start_identity(run: RunFile, recorded: Mapping[str, Any]) -> dict[str, str | None]:
    """The recorded input of the adapter that a training starts with: its hash; None for a new adapter.

    `recorded` are the inputs of the run that is in the run folder, whose entry counts if the adapter has gone.
    """
    start = run.train.start_from
    folder = folder_of(start) if start else None
    return {"start": ((adapter_hash(folder) if folder else None) or recorded.get("start")) if start else None}


def adapter_hash(folder: RunFolder) -> str | None:
    """The hash of the weights that a run has trained; None if it is not trained, or they are gone."""
    weights = folder.adapter / "adapter_model.safetensors"
    return hash_file(weights) if folder.trained.exists() and weights.exists() else None


def check_same_model(start: RunFolder, identity: Mapping[str, Any]) -> None:
    """Raise UsageError if the adapter that a training starts with belongs to another model."""
    theirs = start.recorded_inputs().get(MODEL)
    if theirs and identity.get(MODEL, theirs) != theirs:
        raise UsageError(
            f"train.start_from: the adapter of {start.folder} was trained on another model, "
            f"{start.read_run().model.path}; an adapter fits only the weights that it was trained on"
        )
