"""Begin, resume or extend a run in its folder, and stop if another process takes the folder over.

Design: a training that is extended must end like a longer one from the start. What a step trains does not depend on the
steps that follow, but its learning rate may. So the rates of all steps that the checkpoint contains are compared for
both lengths: they are equal with `constant`, and with `constant_with_warmup` after a number of warm-up steps, but not
with schedules that fall until the last step. The best checkpoint is chosen at the end of a training, so a run with
`train.best` is not extended. What the shorter training gave is moved to `steps-N/` in the run folder, the files that
mark a run as finished first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lookonce.cache.store.claims import note_use, temporary_files
from lookonce.errors import RunFolderError
from lookonce.run.claim import RunClaim
from lookonce.run.config import LENGTH, RunFile
from lookonce.run.folder import RunFolder, step_of
from lookonce.run.open import OpenRun
from lookonce.run.start_adapter import check_same_model, find_start
from lookonce.text import count, quiet
from lookonce.train.loop.checkpoints import best_checkpoint, find_checkpoint
from lookonce.train.loop.scheduler import other_rate
from lookonce.train.loop.trainer_state import read_state

RESULTS = ("summary.json", "trained.json", "metrics", "predictions", "answering", "report.html", "adapter")
ELSEWHERE = "train from the start, in another `output` or with --restart"


@dataclass(frozen=True)
class Start:
    """Where a training starts."""

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
            RunFolderError: the folder holds another run, this one unfinished and `resume` is false, or one that cannot
                be extended; its adapter has changed, or with `train.best` the best checkpoint so far is missing.
            UsageError: the run to start from was trained on another model.
        """
        folder, run = opened.folder, opened.run
        if not restart and _is_finished(opened, identity, resume):
            return cls(is_finished=True)
        if not restart and folder.trained.exists() and not folder.has_other_length(run):
            folder.check_adapter()
            return cls(is_trained=True, checkpoint=folder.last_checkpoint)
        checkpoint = None if restart else find_checkpoint(folder, opened.notify)
        if checkpoint:
            if run.train.best:
                best_checkpoint(checkpoint)  # raises if it is not there
            return cls(checkpoint=checkpoint)
        other = find_start(run)
        if other:
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
            num_steps = self.other.read_trained().num_steps
            yield (
                f"training starts with {adapter}, as it is after its {count(num_steps, 'step')}, and continues as an "
                "adapter of its own, with a new optimizer and schedule; that run stays as it is, and nothing is merged"
            )


def _is_finished(opened: OpenRun, identity: dict[str, Any], resume: bool) -> bool:
    """Whether the folder holds this run, finished; with `resume`, a run of another length is not."""
    folder, run = opened.folder, opened.run
    if resume and folder.has_other_length(run):
        folder.check(run, identity, may_differ=LENGTH)
        check_extension(folder, run)
        return False
    folder.check(run, identity)
    if folder.is_finished:
        return True
    found = "its trained adapter" if folder.trained.exists() else getattr(folder.last_checkpoint, "name", "")
    if found and not resume:
        raise RunFolderError(
            f"{folder.folder} holds this run, unfinished, with {found}; "
            "add --resume to continue from it, or --restart to start again"
        )
    return False


def begin(opened: OpenRun, identity: dict[str, Any], restart: bool) -> None:
    """Record this run in its folder; `restart` first moves the run in it away."""
    owner, folder, run = opened.owner, opened.folder, opened.run
    if restart and (moved := owner.move_away()):
        opened.notify(f"moved the previous run to {moved}")
    owner.check()
    for path in temporary_files(owner.folder):  # of killed processes
        path.unlink(missing_ok=True)
    if folder.has_other_length(run) and (kept := keep_results(folder)):
        opened.notify(f"moved the results of the shorter training to {kept}")
    folder.claim(run, identity, may_differ=LENGTH)
    note_use(opened.cache_folder, owner.folder)


def check_extension(folder: RunFolder, run: RunFile) -> None:
    """Check that the training in a folder can be continued to the length that `run` asks for.

    Raises:
        RunFolderError: there is no checkpoint, or a training of that length would have begun in another way.
    """
    checkpoint = find_checkpoint(folder, quiet)
    if checkpoint is None:
        raise RunFolderError(
            f"{folder.checkpoints} holds no complete checkpoint, so the training cannot be extended; {ELSEWHERE}"
        )
    step, before, wanted = step_of(checkpoint), _num_steps(checkpoint), _wanted_steps(run, checkpoint)
    cannot = f"{folder.folder} holds a training of {before:,} steps, which cannot be continued to {wanted:,}"
    if wanted < step:
        raise RunFolderError(f"{cannot}: its last checkpoint is after step {step:,}; {ELSEWHERE}")
    if run.train.best:
        raise RunFolderError(f"{cannot}: with train.best: {run.train.best} it chose among its steps; {ELSEWHERE}")
    if found := other_rate(run.train, before, wanted, step):
        raise RunFolderError(
            f"{cannot}: with train.scheduler: {run.train.scheduler} and train.warmup: {run.train.warmup:g} the "
            f"learning rate of a step depends on the number of all steps ({found}); {ELSEWHERE}. A training with "
            "`constant`, or with `constant_with_warmup` and a whole number of warm-up steps, can be continued"
        )


def keep_results(folder: RunFolder) -> Path | None:
    """Move the results of a shorter training to `steps-N/`; returns that folder, or None if there are none."""
    checkpoint = find_checkpoint(folder, quiet)
    found = [folder.folder / name for name in RESULTS if (folder.folder / name).exists()]
    if not found or checkpoint is None:
        return None
    target = folder.folder / f"steps-{_num_steps(checkpoint)}"
    target.mkdir(exist_ok=True)
    for path in found:
        path.rename(target / path.name)
    return target


def _num_steps(checkpoint: Path) -> int:
    """The number of steps of the training that wrote a checkpoint."""
    return int(read_state(checkpoint)["max_steps"])


def _wanted_steps(run: RunFile, checkpoint: Path) -> int:
    """The number of steps that a run file asks for; the checkpoint says how many are in an epoch."""
    state = read_state(checkpoint)
    return run.train.steps or math.ceil(run.train.epochs * round(state["global_step"] / state["epoch"]))


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
