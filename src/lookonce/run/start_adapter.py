"""The adapter of another run with whose weights a training starts (`train.start_from`).

Design: the weights alone are taken, so the other run must have the same language model and an adapter of the same
shape. Optimizer, schedule and seed are the run's own, nothing is merged, and the other run's folder is only read. The
hash of the adapter belongs to the recorded inputs: a resumed training with another start is refused. Once it is
recorded, the other run need not exist any more, because checkpoints have the weights.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lookonce.errors import RunFolderError, UsageError
from lookonce.files import hash_file
from lookonce.run.config import RunFile
from lookonce.run.folder import RECORD, RunFolder
from lookonce.run.sections.lora import LoraSection
from lookonce.text import located

SHAPE = ("rank", "alpha", "rslora", "targets", "experts", "modules_to_save")
"""Keys of `lora` that both runs must share; dropout may differ."""
MODEL = "language_model"
"""The recorded input that both runs must share."""


def find_start(run: RunFile) -> RunFolder | None:
    """The run folder of `train.start_from`; None for a training that starts with a new adapter.

    Raises:
        RunFolderError: that run is not trained; names the command.
        UsageError: its adapter has another shape; names the keys.
    """
    path = run.train.start_from
    if path is None:
        return None
    folder = RunFolder.find(path)
    if not folder.trained.exists():
        raise RunFolderError(_not_trained(path, folder))
    if found := shape_differences(run.lora, folder.read_run().lora):
        lines = [f"  {key}: this run {mine!r}, that one {theirs!r}" for key, mine, theirs in found]
        raise UsageError(
            "\n".join([f"train.start_from: the adapter of {folder.folder} has another shape, which differs in", *lines])
            + "\ngive both runs the same section `lora`, apart from its dropout"
        )
    return folder


def _not_trained(path: Path, folder: RunFolder) -> str:
    if not path.is_file() and not (folder.folder / RECORD).exists():
        return f"train.start_from: {located(path)} is not a run folder; name the output folder of a trained run"
    run_file = shlex.quote(str(path if path.is_file() else folder.folder / "run.yaml"))
    return f"train.start_from: {folder.folder} is not trained yet; train it first: lookonce train {run_file} --resume"


def shape_differences(mine: LoraSection, theirs: LoraSection) -> list[tuple[str, Any, Any]]:
    """The keys in which the shapes of two adapters differ, each with both values; lists in any order are the same."""
    values = [(f"lora.{name}", getattr(mine, name), getattr(theirs, name)) for name in SHAPE]
    return [(key, one, other) for key, one, other in values if _sorted(one) != _sorted(other)]


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def start_identity(run: RunFile, recorded: Mapping[str, Any]) -> dict[str, str | None]:
    """The recorded input of the adapter that a training starts with: its hash; None for a new adapter.

    `recorded` are the inputs of the run that is in the run folder, whose entry counts if the adapter has gone.
    """
    path = run.train.start_from
    return {"start": (adapter_hash(RunFolder.find(path)) or recorded.get("start")) if path else None}


def adapter_hash(folder: RunFolder) -> str | None:
    """The hash of the weights that a run has trained; None if it is not trained."""
    return hash_file(folder.adapter / "adapter_model.safetensors") if folder.trained.exists() else None


def check_same_model(start: RunFolder, identity: Mapping[str, Any]) -> None:
    """Check that the adapter that a training starts with belongs to its model.

    Raises:
        UsageError: it was trained on another one.
    """
    theirs = start.recorded_inputs().get(MODEL)
    if theirs and identity.get(MODEL, theirs) != theirs:
        raise UsageError(
            f"train.start_from: the adapter of {start.folder} was trained on another model, "
            f"{start.read_run().model.path}; an adapter fits only the weights that it was trained on"
        )
