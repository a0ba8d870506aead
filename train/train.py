"""One training: open its inputs, claim the run folder, train, save the adapter.

Design: evaluation and summary follow in `lookonce.workflow`, so that training imports neither. A `Training` is opened
before the model is loaded, so that errors in its inputs are reported first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from lookonce.disk_space import full_disk_named
from lookonce.errors import RunFolderError, Stopped
from lookonce.families.kernels import without_kernels
from lookonce.files import flush_files, follow_umask, write_json
from lookonce.run.claim import RunClaim
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder, Trained, adapter_hashes, step_of
from lookonce.run.inputs import RunInputs
from lookonce.run.start_adapter import check_same_model, find_start, start_identity
from lookonce.run.startup import Startup
from lookonce.text import Notify
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.checkpoints import checkpoint_bytes, kept, numbers_only
from lookonce.train.loop.curves_file import CurvesFile
from lookonce.train.loop.distributed import Ranks
from lookonce.train.loop.evaluations import Answer, Evaluations, check_can_answer
from lookonce.train.loop.heartbeat import Heartbeat
from lookonce.train.loop.metrics_log import MetricsLog
from lookonce.train.loop.preemption import RESUME_HINT, StopAfterStep
from lookonce.train.loop.resume import CurrentIntervals, Start, StopIfTakenOver, begin, is_finished
from lookonce.train.loop.session import Session, make_trainer, weights_fit
from lookonce.train.loop.tracking.trackers import Trackers
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.fsdp import is_sharded, shard_frozen
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import PRECISIONS, add_lora, load_weights, load_without_tower, text_model
from lookonce.train.model.lora.targets import beyond_targets


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
    startup: Startup
    owner: RunClaim
    examples: dict[str, tuple[list[Example], int]]
    """By split: the examples, and how many records were left out as too long; empty if the adapter is trained."""

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[Heartbeat]:
        """Keep `progress.json` up to date within the block."""
        samples_per_step = self.session.inputs.run.batch.samples_per_step
        progress, is_lost = self.folder.progress, self.owner.is_lost
        with Heartbeat(progress, samples_per_step, self.ranks.is_first, is_lost=is_lost) as heartbeat:
            yield heartbeat

    @contextlib.contextmanager
    def tracking(self) -> Iterator[Trackers]:
        """Keep a run open in each tracker of `train.track` within the block, on the first rank."""
        checkpoint = self.start.checkpoint
        first_step = step_of(checkpoint) if checkpoint else 0
        is_new = not (checkpoint or self.start.is_trained)

        def open_all() -> None:
            settings = self._run.model_dump(mode="json") | {"inputs": self.folder.recorded_inputs()}
            trackers.open(settings, first_step, is_new=is_new)

        with Trackers(self._run.train.track, self.folder, self.notify) as trackers:
            if trackers.names:
                with self.startup.timed("open trackers"):
                    self.ranks.first_decides(open_all)
            yield trackers

    def run(self, heartbeat: Heartbeat, trackers: Trackers, answer: Answer | None = None) -> Any:
        """Train and save the adapter; `answer` lets the model answer questions while it is trained.

        Returns:
            The trained model; None if it is not in this process, because the adapter was trained before or the
            weights are sharded over the ranks.

        Raises:
            Stopped: a signal asked the training to stop; a checkpoint or the adapter is saved.
            LookonceError: any other error that a user can fix.
        """
        if self.start.is_trained:
            return None
        (examples, num_too_long), (held_out, _) = self.examples["train"], self.examples["val"]
        with self.startup.timed("load weights"), self._weights_fit():
            model = self._load_model()
        log, stop = MetricsLog(self.folder.log, self._run.batch.samples_per_step), StopAfterStep(self.ranks)
        evaluations = Evaluations(self._run.eval.every, answer)
        first = [StopIfTakenOver(self.owner), CurrentIntervals(), evaluations]
        callbacks = [*first, log, CurvesFile(self.folder), stop, heartbeat, *trackers.callbacks()]
        with self._weights_fit():
            trainer = make_trainer(self.session, model, self.arguments, examples, held_out, callbacks, self.startup)
        log.attach(trainer)
        trainer.evaluations = evaluations
        with stop.recording_signals():
            result = self._fit(trainer, model)
            self.ranks.disband()
            if not self.ranks.is_first:
                return model
            self.owner.check()
            self._save_adapter(model)
            trained = Trained(
                num_steps=result.global_step,
                first_step=log.first_step,
                num_samples=round(len(examples) * float(trainer.state.epoch or 0)),
                num_too_long=num_too_long,
                seconds=trainer.seconds,
                wait_share=log.wait_share,
                adapter=adapter_hashes(self.folder.adapter),
                startup_seconds=self.startup.seconds,
            )
            write_json(self.folder.trained, asdict(trained))
        if stop.signal:
            raise Stopped(
                f"stopped by {stop.signal.name} after the last step, the adapter is saved; {RESUME_HINT} (evaluation)"
            )
        return None if is_sharded(model) else model

    def _load_model(self) -> Any:
        run, model_folder = self._run, self.session.inputs.model_folder
        model = load_without_tower(model_folder, PRECISIONS[run.train.precision], run.model.attention, run.train.frozen)
        model = add_lora(model, model_folder, run.lora, run.train.seed)
        if self.start.other:
            load_weights(model, self.start.other.adapter)
        for note in (beyond_targets(text_model(model).layers), self._slow_layers(model)):
            if note:
                self.notify(note)
        return shard_frozen(model, self.arguments.device) if run.train.fsdp and self.ranks.num_ranks > 1 else model

    def _slow_layers(self, model: Any) -> str | None:
        """Why linear attention is slow, in a model that has it and where kernels would be used."""
        uses_kernels = torch.cuda.is_available() and PRECISIONS[self._run.train.precision].itemsize == 2
        return without_kernels(backward=True) if uses_kernels and linear_layers(text_model(model)) else None

    def _weights_fit(self) -> contextlib.AbstractContextManager[None]:
        return weights_fit(self._run, self.session.inputs.model_folder.config)

    def _save_adapter(self, model: Any) -> None:
        folder = self.folder
        with full_disk_named(folder.folder, checkpoint_bytes(model), str(folder.adapter), lambda: kept(folder)):
            model.save_pretrained(str(folder.adapter))
        for path in (folder.checkpoints, folder.adapter):
            follow_umask(path)
        flush_files(folder.adapter)  # before trained.json says that it is there

    def _fit(self, trainer: Any, model: Any) -> Any:
        checkpoint = self.start.checkpoint
        is_compiled = self._run.train.compile and torch.cuda.is_available()
        on_packs = training_on_packs(model, compiled=is_compiled)
        on_batches = on_packs if self._run.batch.has_packs else contextlib.nullcontext()
        with numbers_only(checkpoint), self._weights_fit(), on_batches:
            return trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    @property
    def _run(self) -> RunFile:
        return self.session.inputs.run


def open_training(
    run: RunFile,
    owner: RunClaim,
    *,
    resume: bool = False,
    restart: bool = False,
    verify_images: bool = False,
    before_claim: Callable[[RunInputs], None] = lambda inputs: None,
    notify: Notify = print,
    startup: Startup | None = None,
) -> tuple[Ranks, Training | None]:
    """Claim a run's folder and open its inputs; returns no training if the run is finished.

    `resume` continues from the last checkpoint; `restart` first moves the run in the folder away. The cache must exist.
    `verify_images` reads all images and compares them with the cache; otherwise no image need exist. The first rank
    calls `before_claim` when nothing is left to do but to record the run; an error that it raises stops all ranks.
    `startup` has what was timed so far.

    Raises:
        LookonceError: an input is missing or broken, or the folder holds another run or is in use.
    """
    folder = RunFolder(run.output)
    arguments = training_arguments(run, folder.checkpoints)  # raises for wrong settings before anything is read
    check_can_answer(run, arguments.world_size)
    ranks = Ranks.of(arguments)
    notify = notify if ranks.is_first else _ignore
    startup = startup or Startup(notify)
    ranks.first_decides(lambda: _claim(folder, run, owner, restart))
    if restart or not folder.holds_work:
        ranks.first_decides(lambda: find_start(run))
    if verify_images:
        with startup.timed("read records and all images"):
            inputs = RunInputs.open(run, skip_unusable=True, use=owner.use_cache)
    else:
        inputs = RunInputs.from_cache(run, ranks.first_decides, startup.timed, owner.use_cache)
    recorded = {} if restart else folder.recorded_inputs()
    with startup.timed("hash model and records"):
        identity = ranks.first_decides(lambda: inputs.identity() | start_identity(run, recorded))
    if not restart and ranks.first_decides(lambda: is_finished(folder, inputs, identity, resume)):
        return ranks, None
    ranks.first_decides(lambda: _check_claimed(owner))
    with startup.timed("open cache"):
        session = Session.open(inputs, notify)
    _warn(session, ranks, notify)
    start = ranks.first_decides(lambda: Start.of(folder, run, restart, notify))
    if other := start.other:
        ranks.first_decides(lambda: check_same_model(other, identity))
    if note := start.note(run):
        notify(note)
    examples = {} if start.is_trained else _make_examples(session, startup, notify)
    ranks.first_decides(lambda: before_claim(inputs))
    ranks.first_decides(lambda: begin(owner, inputs, identity, restart, notify))
    return ranks, Training(session, folder, arguments, ranks, start, notify, startup, owner, examples)


def _claim(folder: RunFolder, run: RunFile, owner: RunClaim, restart: bool) -> None:
    """Claim a run folder, unless a finished run is in it that is neither replaced nor extended."""
    if restart or not folder.is_finished or folder.has_other_length(run):
        owner.take()


def _check_claimed(owner: RunClaim) -> None:
    """Check that the folder was claimed: it was not if the run in it was finished, and has been replaced since."""
    if not owner.is_taken:
        raise RunFolderError(
            f"{owner.folder} was changed by another process while this one read it; run the same command again"
        )


def _make_examples(session: Session, startup: Startup, notify: Notify) -> dict[str, tuple[list[Example], int]]:
    """The examples of training and validation records, and how many records were left out as too long."""
    found: dict[str, tuple[list[Example], int]] = {"val": ([], 0)}
    batch, records = session.inputs.run.batch, session.inputs.records
    for split in ("train", "val") if records["val"] else ("train",):
        with startup.timed(f"make tokens of {split} records"):
            found[split] = session.examples(split)
        if num_too_long := found[split][1]:
            left_out = f"left out {num_too_long:,} of {len(records[split]):,} {split} records"
            key, limit = batch.limiting_key, batch.longest_record
            notify(
                f"{left_out}, with more than {limit:,} tokens; raise `{key}` or lower `cache.max_pixels` to keep them"
            )
    return found


def _ignore(note: str) -> None:
    """Drop the notes of all ranks but the first."""


def _warn(session: Session, ranks: Ranks, notify: Notify) -> None:
    run = session.inputs.run
    for note in session.inputs.notes:
        notify(note)
    if run.train.fsdp and ranks.num_ranks == 1:
        notify("train.fsdp has no effect in one process; start several with torchrun")
    if run.cache.stage and run.cache.stage not in session.cache.folder.parents:
        notify(f"no complete copy of the cache in {run.cache.stage}; reading {session.cache.folder}")
    if (run.train.precision, run.cache.dtype) == ("fp32", "bfloat16"):
        notify(
            "features are stored in bfloat16, so this fp32 training gets rounded ones; cache.dtype: float32 avoids that"
        )
