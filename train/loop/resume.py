"""Claim the run folder and find the checkpoint to resume from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.cache.store.uses import note_use
from lookonce.errors import RunFolderError
from lookonce.run.folder import RunFolder
from lookonce.run.inputs import RunInputs
from lookonce.text import Notify


@dataclass(frozen=True)
class Start:
    """Where a training starts."""

    is_trained: bool
    """Whether the adapter is already trained, so that only its evaluation is left."""
    checkpoint: Path | None
    """The checkpoint to resume from; None to start at the first step."""


def is_finished(folder: RunFolder, inputs: RunInputs, identity: dict[str, Any], resume: bool) -> bool:
    """Whether the folder holds this run, finished.

    Raises:
        RunFolderError: it holds another run, or this run unfinished and `resume` is false.
    """
    folder.check(inputs.run, identity)
    if folder.is_finished:
        return True
    found = "its trained adapter" if folder.trained.exists() else getattr(folder.last_checkpoint, "name", "")
    if found and not resume:
        raise RunFolderError(
            f"{folder.folder} holds this run, unfinished, with {found}; "
            "add --resume to continue from it, or --restart to start again"
        )
    return False


def claim(folder: RunFolder, inputs: RunInputs, identity: dict[str, Any], restart: bool, notify: Notify) -> Start:
    """Claim the folder for this run; `restart` first moves the run in it away."""
    if restart and (moved := folder.move_away()):
        notify(f"moved the previous run to {moved}")
    folder.claim(inputs.run, identity)
    note_use(inputs.cache_folder, folder.folder)
    start = Start(folder.trained.exists(), folder.last_checkpoint)
    if start.is_trained:
        notify("adapter already trained; running evaluation")
    elif start.checkpoint:
        notify(f"resuming from {start.checkpoint.name}")
    return start
