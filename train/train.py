"""One training: open its inputs, claim the run folder, train, save the adapter.

Design: evaluation and summary follow in `lookonce.workflow`, so that training imports neither. A `Training` is opened
before the model is loaded, so that errors in its inputs are reported first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import TrainingArguments

from lookonce.datasets.records import Record
from lookonce.disk_space import full_disk_named
from lookonce.environment import rank
from lookonce.errors import RunFolderError, Stopped
from lookonce.families.kernels import without_kernels
from lookonce.files import flush_files, follow_umask, write_json
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder, Trained, adapter_hashes, step_of
from lookonce.run.open import TO_TRAIN, OpenRun, open_run
from lookonce.run.start_adapter import find_start, start_identity
from lookonce.run.startup import Startup
from lookonce.signals import handle_signals
from lookonce.text import Notify, quiet, shell
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.checkpoints import CurrentIntervals, Start, StopIfTakenOver, begin, checkpoint_bytes, kept
from lookonce.train.loop.distributed import RESUME_HINT, Ranks, StopAfterStep
from lookonce.train.loop.log_files import Heartbeat, MetricsLog, drop_lines_after, tracker_callbacks, write_drawn
from lookonce.train.loop.rewards import Draw, RewardTrainer
from lookonce.train.loop.session import make_trainer, weights_fit
from lookonce.train.loop.trainer import Answer, Evaluations, check_can_answer
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import (
    PRECISIONS,
    add_lora,
    is_sharded,
    load_weights,
    load_without_tower,
    shard_frozen,
    text_model,
)
from lookonce.train.model.lora import beyond_targets


@dataclass(frozen=True)
class Training:
    """A training that has claimed its run folder, on one of its ranks."""

    opened: OpenRun
    arguments: TrainingArguments
    ranks: Ranks
    start: Start
    startup: Startup
    identity: dict[str, Any]
    """Hashes of what the training depends on."""
    examples: dict[str, tuple[list[Example], int]]
    """By split: the examples, and how many records were left out as too long; empty if the adapter is trained.

    In a training by rewards those of training are questions.
    """
    questions: list[tuple[Record, int]]
    """In a training by rewards, record and turn of each question."""

    def begin(self, *, restart: bool) -> None:
        """Record the run in its folder; `restart` first moves the run in it away."""
        self.ranks.first_decides(lambda: begin(self.opened, self.identity, restart))

    def heartbeat(self) -> Heartbeat:
        """Keeps `progress.json` up to date within its block."""
        samples_per_step = self.opened.run.batch.samples_per_step
        progress, is_lost = self.opened.folder.progress, self.opened.owner.is_lost
        return Heartbeat(progress, samples_per_step, self.ranks.is_first, is_lost=is_lost)

    def run(self, heartbeat: Heartbeat, answer: Answer | None = None, draw: Draw | None = None) -> Any:
        """Train and save the adapter; `answer` lets the model answer questions while it is trained.

        `draw` is for a training by rewards: it draws answers to the training questions.

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
        run, folder, checkpoint = self.opened.run, self.opened.folder, self.start.checkpoint
        log = MetricsLog(folder.log, run.batch.samples_per_step, run.eval.metric)
        stop = StopAfterStep(self.ranks)
        evaluations = Evaluations(run.eval.every, answer, run.train.patience, run.measure)
        first = [StopIfTakenOver(self.opened.owner), CurrentIntervals(), evaluations]
        callbacks = [*first, log, stop, heartbeat]
        with weights_fit(run, self.opened.model_folder.config):
            with self.startup.timed("load weights"):
                model = self._load_model()
            if self.ranks.is_first:
                first_step = step_of(checkpoint) if checkpoint else 0
                callbacks += tracker_callbacks(run.train.track, folder.folder, first_step)
            inputs = self.opened, model, self.arguments, examples, held_out, callbacks, self.startup
            trainer = make_trainer(*inputs, draw=draw)
        log.trainer, trainer.evaluations = trainer, evaluations
        if isinstance(trainer, RewardTrainer) and self.ranks.is_first:
            drop_lines_after(folder.drawn, first_step)
            trainer.show = partial(write_drawn, folder.drawn, self.questions)
        with handle_signals(stop.record):
            result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            self.ranks.disband()
            if not self.ranks.is_first:
                return model
            self.opened.owner.check()
            self._save_adapter(model)
            trained = Trained(
                num_steps=result.global_step,
                first_step=log.first_step,
                num_samples=round(len(examples) * float(trainer.state.epoch or 0)),
                num_too_long=num_too_long,
                seconds=trainer.seconds,
                wait_share=log.wait_share,
                adapter=adapter_hashes(folder.adapter),
                startup_seconds=self.startup.seconds,
                ended_early=evaluations.why_over(trainer.state),
            )
            if trained.ended_early:
                self.opened.notify(trained.ended_early)
            write_json(folder.trained, asdict(trained))
        if stop.signal:
            raise Stopped(
                f"stopped by {stop.signal.name} after the last step, the adapter is saved; {RESUME_HINT} (evaluation)"
            )
        return None if is_sharded(model) else model

    def _load_model(self) -> Any:
        run, model_folder = self.opened.run, self.opened.model_folder
        model = load_without_tower(model_folder, PRECISIONS[run.train.precision], run.model.attention, run.train.frozen)
        model = add_lora(model, model_folder, run.lora, run.train.seed)
        other = self.start.other
        if self.start.checkpoint and run.train.objective == "grpo" and run.grpo.kl:
            other = find_start(run)  # the reference; the weights of the checkpoint follow
        if other:
            load_weights(model, other.adapter)
        for note in (beyond_targets(text_model(model).layers), self._slow_layers(model)):
            if note:
                self.opened.notify(note)
        return shard_frozen(model, self.arguments.device) if run.train.fsdp and self.ranks.num_ranks > 1 else model

    def _slow_layers(self, model: Any) -> str | None:
        """Why linear attention is slow, in a model that has it and where kernels would be used."""
        uses_kernels = torch.cuda.is_available() and PRECISIONS[self.opened.run.train.precision].itemsize == 2
        return without_kernels(backward=True) if uses_kernels and linear_layers(text_model(model)) else None

    def _save_adapter(self, model: Any) -> None:
        folder = self.opened.folder
        with full_disk_named(folder.folder, checkpoint_bytes(model), str(folder.adapter), lambda: kept(folder)):
            model.save_pretrained(str(folder.adapter))
        for path in (folder.checkpoints, folder.adapter):
            follow_umask(path)
        flush_files(folder.adapter)  # before trained.json says that it is there


def open_training(
    run: RunFile,
    *,
    resume: bool = False,
    restart: bool = False,
    verify_images: bool = False,
    notify: Notify = print,
    startup: Startup | None = None,
) -> Training:
    """Open a run to train it; nothing is changed in its folder before `Training.begin`.

    `resume` continues from the last checkpoint; `restart` trains again. The cache must exist. `verify_images` reads all
    images and compares them with the cache; otherwise no image need exist. `startup` has what was timed so far. The
    caller closes `Training.opened`.

    Raises:
        LookonceError: an input is missing or broken, or the folder holds another run or is in use.
    """
    folder, notify = RunFolder(run.output), notify if rank() == 0 else quiet
    startup = startup or Startup(notify)
    arguments = training_arguments(run, folder.checkpoints)  # raises for wrong settings before anything is read
    check_can_answer(run, arguments.world_size)
    ranks = Ranks.of(arguments)
    stays = not restart and ranks.first_decides(lambda: folder.is_finished)
    needs = replace(TO_TRAIN, writes=not stays, images="hashed" if verify_images else "cached")
    opened = open_run(run, needs, once=ranks.first_decides, timed=startup.timed, notify=notify)
    try:
        if not restart:
            ranks.first_decides(lambda: _check_trains_here(folder))
        with startup.timed("hash model and records"):
            identity = ranks.first_decides(lambda: _identity(opened, restart))
        start = ranks.first_decides(lambda: Start.of(opened, identity, resume, restart))
        if stays and not start.is_finished:
            raise RunFolderError(f"{run.output} was changed by another process just now; run the same command again")
        examples, questions = ({}, []) if start.is_finished else _make_examples(opened, start, ranks, startup)
    except BaseException:
        opened.__exit__()
        raise
    return Training(opened, arguments, ranks, start, startup, identity, examples, questions)


def _check_trains_here(folder: RunFolder) -> None:
    """Check that the run in a folder, if there is one, has its training there."""
    if folder.was_trained_elsewhere:
        raise RunFolderError(
            f"{folder.folder} holds an adapter that another program trained, so there is no training to continue; "
            f"evaluate it with: {shell('lookonce', 'eval', folder.folder)}; or choose another `output`, or move that "
            "run away and train with --restart"
        )


def _identity(opened: OpenRun, restart: bool) -> dict[str, Any]:
    """What the training depends on, by which the run folder recognises it."""
    return opened.identity() | start_identity(opened.run, {} if restart else opened.folder.recorded_inputs())


def _make_examples(
    opened: OpenRun, start: Start, ranks: Ranks, startup: Startup
) -> tuple[dict[str, tuple[list[Example], int]], list[tuple[Record, int]]]:
    """`Training.examples` and `Training.questions`."""
    with startup.timed("open cache"):
        opened.cache  # noqa: B018  (an error names what it lacks before anything else is done)
    for note in (*_notes(opened, ranks), *start.notes(opened.run)):
        opened.notify(note)
    if start.is_trained:
        return {}, []
    opened.model_folder.read_ahead()  # while records become tokens
    examples: dict[str, tuple[list[Example], int]] = {"val": ([], 0)}
    batch, records = opened.run.batch, opened.records
    questions: list[tuple[Record, int]] = []
    for split in ("train", "val") if records["val"] else ("train",):
        asks = split == "train" and opened.run.train.objective == "grpo"
        with startup.timed(f"make tokens of {split} records"):
            if asks:
                questions, prompts, num_too_long = opened.questions(split)
                examples[split] = prompts, num_too_long
            else:
                examples[split] = opened.examples(split)
        if num_too_long := examples[split][1]:
            num_read = len(questions) + num_too_long if asks else len(records[split])
            left_out = f"left out {num_too_long:,} of {num_read:,} {split} {'questions' if asks else 'records'}"
            key, limit = batch.limiting_key, batch.longest_record
            with_answer = ", with an answer of grpo.max_new_tokens" if asks else ""
            opened.notify(
                f"{left_out}, with more than {limit:,} tokens{with_answer}; raise `{key}` or lower `cache.max_pixels` "
                "to keep them"
            )
    return examples, questions


def _notes(opened: OpenRun, ranks: Ranks) -> Iterator[str]:
    """What a user should know of the run as it is opened."""
    run = opened.run
    yield from opened.notes
    if run.train.fsdp and ranks.num_ranks == 1:
        yield "train.fsdp has no effect in one process; start several with torchrun"
    if opened.variants:
        augment = opened.variants.augment
        yield f"each epoch shows one of {augment.variants} variants of each training image, by {augment.recipe}"
    if run.cache.stage and run.cache.stage not in opened.cache.folder.parents:
        yield f"no complete copy of the cache in {run.cache.stage}; reading {opened.cache.folder}"
    if (run.train.precision, run.cache.dtype) == ("fp32", "bfloat16"):
        yield (
            "features are stored in bfloat16, so this fp32 training gets rounded ones; cache.dtype: float32 avoids that"
        )
