"""How a training finds its folder, and where it goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.cache.store.uses import note_use
from lookonce.errors import RunFolderError
from lookonce.run.folder import RunFolder
from lookonce.run.inputs import Inputs
from lookonce.text import Notify


@dataclass(frozen=True)
class Start:
    """Where a training goes on."""

    is_trained: bool
    """The adapter is there; it remains to be evaluated."""
    checkpoint: Path | None


def is_finished(folder: RunFolder, inputs: Inputs, identity: dict[str, Any], resume: bool) -> bool:
    """Whether the folder holds this run with all that it leaves.

    Raises:
        RunFolderError: it holds another run, or this one unfinished, which is not to be resumed.
    """
    folder.check(inputs.run, identity)
    if folder.is_finished:
        return True
    found = "its trained adapter" if folder.trained.exists() else getattr(folder.last_checkpoint, "name", "")
    if found and not resume:
        raise RunFolderError(
            f"{folder.folder} holds this run, unfinished, with {found}; "
            "add --resume to go on from there, or --restart to begin anew"
        )
    return False


def claim(folder: RunFolder, inputs: Inputs, identity: dict[str, Any], restart: bool, notify: Notify) -> Start:
    """Make the folder this run's own; `restart` moves away first what is there."""
    if restart and (moved := folder.move_away()):
        notify(f"moved the run that was there to {moved}")
    folder.claim(inputs.run, identity)
    note_use(inputs.cache_folder, folder.folder)
    start = Start(folder.trained.exists(), folder.last_checkpoint)
    if start.is_trained:
        notify("the adapter is trained already; it remains to be evaluated")
    elif start.checkpoint:
        notify(f"going on from {start.checkpoint.name}")
    return start
