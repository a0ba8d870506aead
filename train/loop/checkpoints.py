"""Checkpoints that are whole: written with checksums, compared before they are loaded, deleted by their step.

Design: Trainer writes a checkpoint file by file into the folder that it stays in. `checksums.json` there is empty at
first, and is written when all other files are on the disk: a checkpoint without its content was interrupted and is
ignored, and one whose files no longer agree with it is damaged and passed over. Trainer would delete old checkpoints
before the new one is on the disk, and the newest one first if the clock was set back, so they are deleted here.

Cost: an fsync a file, and reading each file once after it was written (from memory) and once before it is loaded; half
a second a gigabyte, and what the disk takes.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from lookonce.disk_space import full_disk_named
from lookonce.errors import RunFolderError, TrainingError
from lookonce.files import flush, flush_files, hash_file, read_json, write_json
from lookonce.run.folder import AGAIN, CHECKSUMS, STATE, RunFolder, is_complete, step_of
from lookonce.text import Notify, listed, shown
from lookonce.train.loop.trainer_state import read_state

NEEDED = (STATE, "adapter_model.safetensors", "optimizer.pt", "scheduler.pt")
"""Files without which no training is resumed."""
LOADED = ("adapter_*", "*.pt", "*.pth", "*.safetensors", "*.bin")
"""Files that Trainer, PEFT or PyTorch may load from a checkpoint."""
OTHER_BYTES = 1_000_000
"""More than the files of a checkpoint take that are neither weights nor optimizer state."""
MAKE_ROOM = (
    "make room (`lookonce cache gc RUN.yaml` lists caches that can be deleted), then continue with: "
    "lookonce train RUN.yaml --resume"
)


def kept(folder: RunFolder) -> str:
    """Which checkpoint a training continues from if the disk is full, and what to do."""
    before = folder.last_checkpoint
    return f"{f'{before.name} is whole' if before else 'There is no checkpoint yet'}: {MAKE_ROOM}"


def find_checkpoint(folder: RunFolder, notify: Notify) -> Path | None:
    """The newest checkpoint whose files are as they were written; `notify` gets a note of each damaged one."""
    checkpoints = folder.complete_checkpoints()
    for checkpoint in checkpoints:
        if damaged := damaged_files(checkpoint):
            notify(f"{checkpoint} is damaged ({_changed(damaged)}), so it is not used")
        elif (step := _recorded_step(checkpoint)) not in (None, step_of(checkpoint)):
            notify(f"{checkpoint} was written after step {step}, and renamed or copied since, so it is not used")
        else:
            return checkpoint
    if checkpoints:
        notify("no checkpoint is left; starting at the first step")
    return None


def check_undamaged(checkpoint: Path) -> None:
    """Check the files of a checkpoint before it becomes the result of a training.

    Raises:
        TrainingError: a file is missing or has changed.
    """
    if damaged := damaged_files(checkpoint):
        raise TrainingError(
            f"the best checkpoint, {checkpoint}, is damaged ({_changed(damaged)}); "
            "train again with: lookonce train RUN.yaml --restart"
        )


def best_checkpoint(checkpoint: Path) -> Path | None:
    """The best checkpoint before and at another one, in the folder in which that lies now; None if there is none yet.

    Trainer records its absolute path, which leads elsewhere when the run folder has been moved or copied.

    Raises:
        RunFolderError: it is not there.
    """
    recorded = read_state(checkpoint).get("best_model_checkpoint")
    if recorded is None:
        return None
    best = checkpoint.parent / Path(recorded).name
    if not is_complete(best) or step_of(best) < 0:
        raise RunFolderError(
            f"{checkpoint} records {shown(recorded)} as the best checkpoint so far, and {checkpoint.parent} holds no "
            f"complete {shown(best.name)}; copy it there, or {AGAIN}"
        )
    return best


@contextlib.contextmanager
def numbers_only(checkpoint: Path | None) -> Iterator[None]:
    """Name a checkpoint that is loaded within the block and holds more than numbers, or a state of another form.

    Trainer has PyTorch unpickle optimizer, schedule and random state with `weights_only`, which runs no code of the
    file.

    Raises:
        TrainingError: PyTorch refused one of its files.
        RunFolderError: Trainer cannot have written its state.
    """
    if checkpoint:
        read_state(checkpoint)
    try:
        yield
    except UnpicklingError:
        raise TrainingError(
            f"{checkpoint} holds other objects than a training writes, and none of them was loaded; "
            "train again with: lookonce train RUN.yaml --restart"
        ) from None


def _changed(files: list[str]) -> str:
    return f"missing, or changed since it was written: {listed(files)}"


def damaged_files(checkpoint: Path) -> list[str]:
    """The files of a checkpoint that are missing, unreadable, changed, or loaded without a checksum."""
    try:
        recorded = dict(read_json(checkpoint / CHECKSUMS))
    except (OSError, ValueError, TypeError):
        return [CHECKSUMS]
    changed = [str(name) for name, checksum in recorded.items() if _checksum(checkpoint, name) != checksum]
    loaded = {path.name for pattern in LOADED for path in checkpoint.glob(pattern)} | {*NEEDED}
    return changed + sorted(loaded - recorded.keys())


def _recorded_step(checkpoint: Path) -> int | None:
    """The step after which Trainer wrote a checkpoint, by its state; None if that does not name one."""
    with contextlib.suppress(OSError, ValueError):
        state = read_json(checkpoint / STATE)
        step = state.get("global_step") if isinstance(state, dict) else None
        return step if type(step) is int else None
    return None


def _checksum(checkpoint: Path, name: str) -> str | None:
    """The checksum of a file of a checkpoint; None if it cannot be read or lies elsewhere."""
    try:
        path = checkpoint / name
        return hash_file(path) if path.resolve().is_relative_to(checkpoint.resolve()) else None
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def saving(checkpoint: Path, num_bytes: int) -> Iterator[None]:
    """Write a checkpoint of about `num_bytes` within the block; it counts only when the block has ended.

    Raises:
        DiskFull: there is no room; what was written is deleted.
    """
    folder = checkpoint.parent.parent
    with full_disk_named(folder, num_bytes, f"{checkpoint.name} of {folder}", lambda: kept(RunFolder(folder))):
        delete(checkpoint)
        try:
            checkpoint.mkdir(parents=True)
            (checkpoint / CHECKSUMS).touch()
            yield
            _complete(checkpoint)
        except Exception:
            delete(checkpoint)
            raise


def _complete(checkpoint: Path) -> None:
    flush_files(checkpoint)
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    write_json(checkpoint / CHECKSUMS, {str(path.relative_to(checkpoint)): hash_file(path) for path in files})
    flush(checkpoint.parent)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, if it exists; one that is deleted in part does not count."""
    (checkpoint / STATE).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def delete_old(newest: Path, best: str | None, num_kept: int) -> None:
    """Delete the oldest checkpoints before `newest`, and those that are not complete.

    `num_kept` are left; the newest and the best one are among them.
    """
    older = {path for path in newest.parent.iterdir() if 0 <= step_of(path) < step_of(newest)}
    kept = {newest} | {path for path in older if best and path.name == Path(best).name}
    for path in sorted(older - kept, key=step_of, reverse=True):
        if is_complete(path) and len(kept) < num_kept:
            kept.add(path)
        else:
            delete(path)


def checkpoint_bytes(model: Any, optimizer: Any = None) -> int:
    """The size of a checkpoint or an adapter: the trained weights, the optimizer's state, and a margin for the rest."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    states = [value for state in optimizer.state.values() for value in state.values()] if optimizer else []
    return OTHER_BYTES + sum(int(getattr(value, "nbytes", 0)) for value in (*weights, *states))
