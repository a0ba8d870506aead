"""Checkpoints: written whole, compared before they are loaded, deleted by their step; how a run begins or continues.

Trainer writes a checkpoint file by file into the folder that it stays in. `checksums.json` there is empty at first, and
is written when all other files are on the disk: a checkpoint without its content was interrupted and is ignored, and
one whose files no longer agree with it is damaged and passed over. Trainer would delete old checkpoints before the new
one is on the disk, and the newest one first if the clock was set back, so they are deleted here. The cost: an fsync a
file, and reading each file after it was written and before it is loaded, half a second a gigabyte.

Checksums find damage, and not an author who wrote them too. So each field of Trainer's state has its form here, or a
wrong one would end as an error of Python later; one that a later version of transformers adds may be anything.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from transformers import TrainerCallback, TrainerState

from lookonce.cache.store.claims import leftovers, note_use
from lookonce.disk_space import full_disk_named
from lookonce.errors import RunFolderError, TrainingError
from lookonce.files import flush, flush_files, hash_file, read_json, write_json
from lookonce.run.config import RunFile
from lookonce.run.folder import AGAIN, CHECKSUMS, STATE, RunClaim, RunFolder, is_complete, read_form, step_of
from lookonce.run.open import OpenRun
from lookonce.run.start_adapter import check_same_model, find_start
from lookonce.text import Notify, listed, shown

LOSSES = "losses"
"""Under this name in `stateful_callbacks`: the sums of losses so far, of the logged steps and of those since."""
REWARDS = "rewards"
"""There too: where a training by rewards is among its questions, and what it has measured since the logged steps."""
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Steps = Annotated[int, Field(gt=0, lt=1 << 63)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
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


class _Losses(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    num_steps: Count
    last_logged_step: Count
    logged: float
    not_logged: float


class _Rewards(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    position: Count
    tokens_per_batch: Steps | None
    sums: dict[str, float]
    ended: str = ""


class _Callbacks(BaseModel):
    losses: _Losses | None = None
    rewards: _Rewards | None = None


class State(BaseModel):
    """Trainer's state in a checkpoint: how far it was, and how far it had to go."""

    model_config = ConfigDict(strict=True, extra="allow")

    global_step: Steps
    max_steps: Steps
    epoch: Annotated[float, Field(gt=1e-18, lt=1e18)]
    num_train_epochs: Count = 0
    num_input_tokens_seen: Count = 0
    logging_steps: Number = 0
    eval_steps: Number = 0
    save_steps: Number = 0
    total_flos: Number = 0
    train_batch_size: Count | None = None
    best_global_step: Count | None = None
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    log_history: list[dict[str, Any]] = []
    stateful_callbacks: _Callbacks = _Callbacks()

    @model_validator(mode="after")
    def _has_only_fields_of_trainer(self) -> State:
        if unknown := sorted((self.model_extra or {}).keys() - {field.name for field in fields(TrainerState)}):
            raise ValueError(f"Trainer has no field {shown(repr(unknown[0]))}")
        return self


def read_state(checkpoint: Path) -> State:
    """Trainer's state in a checkpoint; raises RunFolderError, with the field, if Trainer cannot have written it."""
    path = checkpoint / STATE
    state = read_form(path, State, AGAIN)
    if state.global_step != step_of(checkpoint):
        raise RunFolderError(
            f"{path} is broken: global_step is {state.global_step}, expected {step_of(checkpoint)}; {AGAIN}"
        )
    return state


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
        else:
            return checkpoint
    if checkpoints:
        notify("no checkpoint is left; starting at the first step")
    return None


def check_undamaged(checkpoint: Path) -> None:
    """Check a checkpoint before it becomes the result; raises TrainingError if a file is missing or has changed."""
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
    recorded = read_state(checkpoint).best_model_checkpoint
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


@dataclass(frozen=True)
class Start:
    is_finished: bool = False
    """Whether the run is trained and evaluated, so that nothing is left to do."""
    is_trained: bool = False
    """Whether the adapter is already trained, so that only its evaluation is left."""
    checkpoint: Path | None = None
    """The checkpoint to resume from, or the last one of a trained adapter; None to start at the first step."""
    other: RunFolder | None = None
    """The run with whose adapter the first step starts; None for a new adapter, or to resume."""

    @classmethod
    def of(cls, opened: OpenRun, identity: dict[str, Any], resume: bool, restart: bool) -> Start:
        """Where the training of an open run starts; `identity` is what it depends on.

        Raises:
            RunFolderError: the folder holds another run, or this one unfinished and `resume` is false; its adapter has
                changed, or with `train.best` the best checkpoint so far is missing.
            UsageError: the run to start from was trained on another model.
        """
        folder, run = opened.folder, opened.run
        is_finished = not restart and _is_finished(opened, identity, resume)
        if is_finished or (not restart and folder.trained.exists()):
            folder.check_adapter()
            return cls(is_finished=True) if is_finished else cls(is_trained=True, checkpoint=folder.last_checkpoint)
        checkpoint = None if restart else find_checkpoint(folder, opened.notify)
        if checkpoint:
            if run.train.best:
                best_checkpoint(checkpoint)  # raises if it is not there
            return cls(checkpoint=checkpoint)
        if other := find_start(run):
            check_same_model(other, identity)
        return cls(other=other)

    def notes(self, run: RunFile) -> Iterator[str]:
        """What a user should know of the start; nothing for a new adapter."""
        if self.is_trained:
            yield "adapter already trained; running evaluation"
        elif self.checkpoint:
            yield f"resuming from {self.checkpoint.name}"
        elif self.other:
            theirs = self.other.read_run().train.frozen
            other_weights = f" (trained with train.frozen: {theirs})" if theirs != run.train.frozen else ""
            adapter = f"the adapter of {self.other.folder}{other_weights}"
            if not run.train.has_steps:
                yield f"nothing is trained: {adapter} answers as it is"
                return
            yield f"training starts with {adapter}, and a new optimizer and schedule; that run stays as it is"


def _is_finished(opened: OpenRun, identity: dict[str, Any], resume: bool) -> bool:
    """Whether the folder holds this run, finished."""
    folder = opened.folder
    folder.check(opened.run, identity)
    if folder.is_finished:
        return True
    newest = "its trained adapter" if folder.trained.exists() else getattr(folder.last_checkpoint, "name", "")
    if newest and not resume:
        raise RunFolderError(
            f"{folder.folder} holds this run, unfinished, with {newest}; "
            "add --resume to continue from it, or --restart to start again"
        )
    return False


def begin(opened: OpenRun, identity: dict[str, Any], restart: bool) -> None:
    """Record this run in its folder; `restart` first moves the run in it away."""
    owner, folder, run = opened.owner, opened.folder, opened.run
    if restart and (moved := owner.move_away()):
        opened.notify(f"moved the previous run to {moved}")
    owner.check()
    for path, kind in leftovers(owner.folder):
        if kind == "temporary file":
            path.unlink(missing_ok=True)
    folder.claim(run, identity)
    note_use(opened.cache_folder, owner.folder)


class CurrentIntervals(TrainerCallback):
    """Applies `logging_steps`, `eval_steps` and `save_steps` of the run file; a checkpoint restores its own ones.

    So it does with the path of the best checkpoint, which Trainer ignores if it leads nowhere and follows if it leads
    into the folder of another run: it becomes that of this run folder.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)
        if args.load_best_model_at_end and state.global_step:
            best = best_checkpoint(Path(args.output_dir) / f"checkpoint-{state.global_step}")
            state.best_model_checkpoint = str(best) if best else None


class StopIfTakenOver(TrainerCallback):
    """Ends a training whose run folder another process has taken over; the first callback, so it writes nothing."""

    def __init__(self, owner: RunClaim) -> None:
        self._owner = owner

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._owner.check()

    on_step_end = on_log = on_evaluate = on_epoch_end = on_train_begin
