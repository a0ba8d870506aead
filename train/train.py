"""One training: open its inputs, claim the run folder, train, save the adapter.

Design: evaluation and summary follow in `lookonce.workflow`, so that training imports neither. A `Training` is opened
before the model is loaded, so that errors in its inputs are reported first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from lookonce.errors import Stopped
from lookonce.files import follow_umask, write_json
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder, Trained
from lookonce.run.inputs import RunInputs
from lookonce.text import Notify
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.distributed import Ranks
from lookonce.train.loop.heartbeat import Heartbeat
from lookonce.train.loop.metrics_log import MetricsLog
from lookonce.train.loop.preemption import RESUME_HINT, StopAfterStep
from lookonce.train.loop.resume import Start, claim, is_finished
from lookonce.train.loop.session import Session, make_trainer
from lookonce.train.loop.trainer import training_arguments
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.fsdp import is_sharded, shard_frozen
from lookonce.train.model.load import PRECISIONS, add_lora, load_without_tower


@dataclass(frozen=True)
class Training:
    """A training that has claimed its run folder, on one of its ranks."""

    session: Session
    folder: RunFolder
    arguments: TrainingArguments
    ranks: Ranks
    start: Start
    notify: Notify
    """Prints notes on the first rank, nothing on the others."""

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[Heartbeat]:
        """Keep `progress.json` up to date within the block."""
        samples_per_step = self.session.inputs.run.batch.samples_per_step
        with Heartbeat(self.folder.progress, samples_per_step, self.ranks.is_first) as heartbeat:
            yield heartbeat

    def run(self, heartbeat: Heartbeat) -> Any:
        """Train and save the adapter.

        Returns:
            The trained model; None if it is not in this process, because the adapter was trained before or the
            weights are sharded over the ranks.

        Raises:
            Stopped: a signal asked the training to stop; a checkpoint or the adapter is saved.
            LookonceError: any other error that a user can fix.
        """
        if self.start.is_trained:
            return None
        examples, num_too_long = self._examples("train")
        held_out, _ = self._examples("val") if self.session.inputs.records["val"] else ([], 0)
        model = self._load_model()
        log, stop = MetricsLog(self.folder.log, self._run.batch.samples_per_step), StopAfterStep(self.ranks)
        callbacks = [log, stop, heartbeat]
        trainer = make_trainer(self.session, model, self.arguments, examples, held_out, callbacks, notify=self.notify)
        log.attach(trainer)
        with stop.recording_signals():
            result = self._fit(trainer, model)
            self.ranks.disband()
            if not self.ranks.is_first:
                return model
            model.save_pretrained(str(self.folder.adapter))
            for folder in (self.folder.checkpoints, self.folder.adapter):
                follow_umask(folder)
            trained = Trained(
                num_steps=result.global_step,
                first_step=log.first_step,
                num_samples=round(len(examples) * float(trainer.state.epoch or 0)),
                num_too_long=num_too_long,
                seconds=float(result.metrics["train_runtime"]),
                wait_share=log.wait_share,
            )
            write_json(self.folder.trained, asdict(trained))
        if stop.signal:
            raise Stopped(
                f"stopped by {stop.signal.name} after the last step, the adapter is saved; {RESUME_HINT} (evaluation)"
            )
        return None if is_sharded(model) else model

    def _load_model(self) -> Any:
        run, model_folder = self._run, self.session.inputs.model_folder
        model = load_without_tower(model_folder, PRECISIONS[run.train.precision], run.model.attention)
        model = add_lora(model, model_folder, run.lora, run.train.seed)
        return shard_frozen(model, self.arguments.device) if run.train.fsdp and self.ranks.num_ranks > 1 else model

    def _fit(self, trainer: Any, model: Any) -> Any:
        checkpoint = self.start.checkpoint
        is_compiled = self._run.train.compile and torch.cuda.is_available()
        on_packs = training_on_packs(model, compiled=is_compiled)
        with on_packs if self._run.batch.has_packs else contextlib.nullcontext():
            return trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def _examples(self, split: str) -> tuple[list[Example], int]:
        examples, num_too_long = self.session.examples(split)
        if num_too_long:
            batch, num_records = self._run.batch, len(self.session.inputs.records[split])
            limit = f"{batch.longest_record} tokens (`{batch.limiting_key}`)"
            self.notify(f"left out {num_too_long} of {num_records} {split} records with more than {limit}")
        return examples, num_too_long

    @property
    def _run(self) -> RunFile:
        return self.session.inputs.run


def open_training(
    run: RunFile, *, resume: bool = False, restart: bool = False, notify: Notify = print
) -> tuple[Ranks, Training | None]:
    """Open a run's inputs and claim its folder; returns no training if the run is finished.

    `resume` continues from the last checkpoint; `restart` first moves the run in the folder away. The cache must exist.

    Raises:
        LookonceError: an input is missing or broken, or the folder holds another run.
    """
    folder = RunFolder(run.output)
    arguments = training_arguments(run, folder.checkpoints)  # raises for wrong settings before anything is read
    ranks = Ranks.of(arguments)
    notify = notify if ranks.is_first else _ignore
    inputs = RunInputs.open(run)
    identity = ranks.first_decides(inputs.identity)
    if not restart and ranks.first_decides(lambda: is_finished(folder, inputs, identity, resume)):
        return ranks, None
    session = Session.open(inputs)
    _warn(session, ranks, notify)
    start = ranks.first_decides(lambda: claim(folder, inputs, identity, restart, notify))
    return ranks, Training(session, folder, arguments, ranks, start, notify)


def _ignore(note: str) -> None:
    """Drop the notes of all ranks but the first."""


def _warn(session: Session, ranks: Ranks, notify: Notify) -> None:
    run = session.inputs.run
    if run.train.fsdp and ranks.num_ranks == 1:
        notify("train.fsdp has no effect in one process; start several with torchrun")
    if run.cache.stage and run.cache.stage not in session.cache.folder.parents:
        notify(f"no complete copy of the cache in {run.cache.stage}; reading {session.cache.folder}")
    if (run.train.precision, run.cache.dtype) == ("fp32", "bfloat16"):
        notify(
            "features are stored in bfloat16, so this fp32 training gets rounded ones; cache.dtype: float32 avoids that"
        )
