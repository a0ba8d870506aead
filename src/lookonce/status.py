"""How far a run is: the state of its plan, cache, training and evaluation, found and shown.

Design: everything is read from the files that the phases write, so the answer is right after any crash. Images are
identified by the plan and its stamps; only images that the plan does not know are read. A finished run has nothing
missing, even if its cache is gone. It costs 0.1 ms an image, half of it for the images' stamps.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lookonce.cache.build.progress import (
    Finished,
    StatusReport,
    WorkerStatus,
    index_from_plan,
    new_shards,
    pending_shards,
    status,
    workers_table,
)
from lookonce.cache.format import REPAIR_COMMAND
from lookonce.cache.store.metadata import QUARANTINE, Plan, PlannedImage, read_plan, read_receipts
from lookonce.cache.store.shards import SHARDS
from lookonce.claim_file import age
from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.records import Record
from lookonce.environment import program
from lookonce.errors import RunFolderError
from lookonce.eval.answers.files import unfinished
from lookonce.eval.scores.metric import Headline
from lookonce.eval.scores.metrics import read_headline
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder, TrainedElsewhere, find_trainer, step_of
from lookonce.run.log_file import read_progress
from lookonce.run.open import Needs, OpenRun, open_run
from lookonce.run.records import UNUSABLE_ADVICE, without_fold
from lookonce.run.start_adapter import start_identity
from lookonce.text import count, duration, rows, shell, size

TrainingState = Literal[
    "not begun", "running", "dead", "stopped", "failed", "trained", "trained elsewhere", "finished", "another run"
]


@dataclass(frozen=True)
class CachePhase:
    is_planned: bool
    """Whether the plan covers all images that can be read."""
    num_files: int
    """Image files that the records name."""
    num_shards: int
    """Planned shards with images of this run."""
    num_pending: int
    """Planned shards of this run that are not finished."""
    report: StatusReport
    """The cache's own status, for images that are in the plan."""
    lost: list[str]
    """Finished shards whose files are missing."""

    def text(self) -> str:
        """How much is built, and how fast the rest is being built."""
        if not self.num_shards:
            return "nothing yet"
        report = self.report
        done = f"{report.num_done:,} of {count(report.num_images, 'image')}"
        shards = f"{self.num_shards - self.num_pending:,} of {count(self.num_shards, 'shard')}"
        return "; ".join(filter(None, [f"{done} in {shards}, {size(report.num_bytes)}", report.pace()]))

    def plan_text(self) -> str:
        if not self.num_files:
            return "nothing to encode: the records name no images"
        if not self.num_shards:
            return f"none yet; the records name {count(self.num_files, 'image file')}"
        planned = f"{count(self.num_shards, 'shard')} of features for {count(self.report.num_images, 'image')}"
        return planned if self.is_planned else f"{planned}; more images need planning"


@dataclass(frozen=True)
class TrainingPhase:
    """State of the training: how far it is, or how it ended; the figures are those of `Progress`."""

    state: TrainingState
    phase: str = ""
    """What a running training is doing: loading, training or evaluating."""
    step: int = 0
    num_steps: int = 0
    """0 if not known."""
    loss: float | None = None
    validation_loss: float | None = None
    exact_match: float | None = None
    score: float | None = None
    reward: float | None = None
    mixed_share: float | None = None
    ms_per_sample: float | None = None
    eta_s: float | None = None
    silent_s: float | None = None
    """Seconds since the last heartbeat of a running or dead training."""
    stepped_s: float | None = None
    """Seconds between its last step and its last heartbeat."""
    job: str = ""
    host: str = ""
    checkpoint: str | None = None
    """The newest checkpoint to resume from."""
    reason: str = ""
    """Why it stopped or failed, or ended before its last step."""
    startup_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each piece of work before the first step, of a finished training."""

    def text(self) -> str:
        where = f" (job {self.job})" if self.job else f" on {self.host}"
        heartbeat = f"last heartbeat {duration(self.silent_s or 0)} ago{where}"
        resume = f"--resume continues from {self.checkpoint}" if self.checkpoint else "no checkpoint to resume from"
        texts = {
            "running": [self._where(), *self._figures(), heartbeat],
            "dead": [f"dead at {self._where()}", heartbeat, resume],
            "stopped": [self.reason.partition(";")[0] or f"stopped at {self._where()}", resume],
            "failed": [f"failed at {self._where()}: {self.reason}", resume],
            "trained": [f"trained for {count(self.num_steps, 'step')}, adapter saved", self.reason],
            "finished": [f"finished: {count(self.num_steps, 'step')}", *self._figures(), self.reason],
        }.get(self.state, [self.state])
        return ", ".join(filter(None, texts))

    def _where(self) -> str:
        if not self.num_steps or self.phase not in ("", "training"):
            return self.phase or "an unknown step"
        return f"step {self.step:,} of {self.num_steps:,}"

    def _figures(self) -> list[str]:
        if self.state not in ("running", "finished"):
            return []
        eta_s = self.eta_s if self.phase == "training" else None
        figures = {
            "reward {:.3f}": self.reward,
            "{:.0%} of questions mixed": self.mixed_share,
            "loss {:.4f}": self.loss if self.reward is None else None,
            "validation loss {:.4f}": self.validation_loss,
            "score {:.1%}": self.score,
            "exact match {:.1%}": self.exact_match,
            "{:.1f} ms per sample": self.ms_per_sample,
        }
        texts = [text.format(value) for text, value in figures.items() if value is not None]
        return texts if eta_s is None else [*texts, f"steps done in {duration(eta_s)}"]


@dataclass(frozen=True)
class State:
    output: Path
    cache: CachePhase
    training: TrainingPhase
    scores: dict[str, Headline]
    """Scores, by the metric that counts, of all evaluations of the adapter, by split."""
    unfinished: dict[str, tuple[int, int]]
    """Questions answered so far, of all, of each evaluation that has no result, by split and baseline."""
    split: str
    """The split that the run file evaluates (`eval.split`)."""
    is_trained: bool
    is_evaluated: bool
    """Whether that split is evaluated, or has no records."""
    notes: list[str]
    """Problems that running a phase again does not solve."""
    logs: list[str]
    """Where to find the logs of slow or dead workers, and of a dead or failed training."""

    def missing(self) -> list[str]:
        """The phases with work left, in order: plan, cache (with the number of shards), train, eval."""
        if self.is_trained and self.is_evaluated:
            return []
        phases = ["plan", "cache"]
        if self.cache.is_planned:
            phases = [f"cache {self.cache.num_pending}"] if self.cache.num_pending else []
        phases += [] if self.is_trained else ["train"]
        return phases if self.is_evaluated else [*phases, "eval"]

    @property
    def is_under_way(self) -> bool:
        return self.training.state == "running" or any(worker.alive for worker in self.cache.report.workers)

    def text(self) -> str:
        lines = [
            ("plan", self.cache.plan_text()),
            ("cache", self.cache.text()),
            ("training", self.training.text()),
            *self._evaluations(),
        ]
        workers: list[WorkerStatus] = self.cache.report.workers
        blocks = [
            str(self.output),
            rows(lines),
            workers_table(workers) if workers else "",
            "\n".join(self.logs),
            "\n".join(f"Note: {note}" for note in self.notes),
        ]
        return "\n\n".join(filter(None, blocks))

    def _evaluations(self) -> list[tuple[str, str]]:
        texts = [
            f"{split}: {score.text()}; majority baseline (the most frequent training answer): {score.majority:.1%}"
            for split, score in self.scores.items()
        ]
        for name, (num_answered, num_questions) in self.unfinished.items():
            texts.append(f"{name}: {num_answered:,} of {count(num_questions, 'question')} answered so far")
        texts = texts or ["not yet"]
        return list(zip(["evaluation", *[""] * (len(texts) - 1)], texts, strict=True))


SUBMIT = Path("slurm/submit.sh")
LOGS = Path("logs")
"""The jobs of slurm/ write their logs here, each to NAME-JOB.out."""


def find_state(run: RunFile) -> State:
    """How far a run is; hashes the tower if its fingerprint is not recorded, and downloads nothing.

    Raises:
        LookonceError: records or model are missing or broken.
        CacheCorrupt: a receipt or the plan differs from what was written.
    """
    opened = open_run(run, Needs("lookonce status", records="all", model="fingerprint", is_local=True))
    folder, split, plan = opened.folder, run.eval.split, read_plan(opened.cache_folder)
    images, covers = known_images(plan, opened.all_records())
    if run.cache.augment:
        images = images.with_variants(run.cache.augment, opened.records["train"])
    cache = find_cache_phase(opened, images, plan, covers)
    notes = [*opened.notes]
    records = without_fold(run, opened.records, images, notes.append)
    conflict = _conflict(opened, records, images, cache.is_planned)
    training = TrainingPhase("another run") if conflict else find_training(folder, run.cache.claim_s)
    scores = {} if conflict else find_scores(folder, split)
    return State(
        output=run.output,
        cache=cache,
        training=training,
        scores=scores,
        unfinished={} if conflict else find_unfinished(folder, records),
        split=split,
        is_trained=folder.trained.exists() and not conflict,
        is_evaluated=split in scores or not (conflict or records[split]),
        notes=[*conflict, *notes, *_problems(cache, images)],
        logs=list(_logs(cache, training)),
    )


def known_images(plan: Plan, records: Iterable[Record]) -> tuple[ImageIndex, bool]:
    """The images of `records`, and whether all are known; without a plan none is read, and those it lacks are."""
    records = list(records)
    paths = dict.fromkeys(path for record in records for path in record.images)
    index = index_from_plan(plan, paths, without_files=True)
    if all(path in index.key_of for path in paths):
        return index, True
    return (index_images(records, index), True) if plan.shards else (index, False)


def find_cache_phase(opened: OpenRun, images: ImageIndex, plan: Plan, covers: bool) -> CachePhase:
    """The state of plan and cache; `covers` says that the plan knows all images by name."""
    folder = opened.cache_folder
    receipts = list(read_receipts(folder))
    report = status(folder, images.path_of, receipts, opened.run.cache.claim_s)
    finished = Finished.of(receipts)
    files = {
        path.stem for path in (folder / SHARDS).glob("*.safetensors")
    }  # after the receipts, which are written later
    shards = [shard for shard in plan.shards if not images.path_of.keys().isdisjoint(shard.keys)]
    planned = [PlannedImage(key, 0, ()) for key in images.path_of]
    new = new_shards(plan, finished, planned, opened.fingerprint, opened.shard_bytes, images.former)
    return CachePhase(
        is_planned=covers and not new,
        num_files=len({path for record in opened.all_records() for path in record.images}),
        num_shards=len(shards),
        num_pending=len(pending_shards(plan, finished, images.path_of, images.former)),
        report=report,
        lost=[shard.name for shard in shards if shard.name in finished.shards and shard.name not in files],
    )


def _conflict(opened: OpenRun, records: dict[str, list[Record]], images: ImageIndex, has_all: bool) -> list[str]:
    """Why the output folder belongs to another run; compares what is known without opening the model."""
    run, folder = opened.run, opened.folder
    identity: dict[str, Any] = {"cache": opened.fingerprint.sha256}
    paths = [path for split_records in records.values() for record in split_records for path in record.images]
    if has_all and all(path in images.key_of for path in paths):
        identity = opened.changed(records=records, images=images).records_identity()
    try:
        folder.check(run, identity | start_identity(run, folder.recorded_inputs()))
    except RunFolderError as error:
        return [str(error)]
    return []


def find_training(folder: RunFolder, expiry_s: float) -> TrainingPhase:
    """The state of the training in a run folder; without a heartbeat for `expiry_s` it is dead."""
    progress, last = read_progress(folder.progress), folder.last_checkpoint
    checkpoint = last.name if last else None
    trained = folder.read_trained() if folder.trained.exists() else None
    if isinstance(trained, TrainedElsewhere):
        return TrainingPhase("trained elsewhere")
    num_steps, startup_seconds = (trained.num_steps, trained.startup_seconds) if trained else (0, {})
    ended_early = trained.ended_early if trained else ""
    trainer = find_trainer(folder.folder, expiry_s)
    if trainer and (progress is None or progress.worker != trainer):  # it has not begun to write its progress
        return TrainingPhase("running", phase="loading", job=trainer.job, host=trainer.host, checkpoint=checkpoint)
    if progress is None:
        state: TrainingState = "trained" if num_steps else "stopped" if last else "not begun"
        step = step_of(last) if last else 0
        state = "finished" if folder.is_finished else state
        return TrainingPhase(
            state, step=step, checkpoint=checkpoint, startup_seconds=startup_seconds, reason=ended_early
        )
    silent_s = max(age(folder.progress), 0.0)
    state = progress.end or ("dead" if silent_s > expiry_s or progress.worker.is_gone() else "running")
    if state != "running" and num_steps:
        state = "finished" if folder.is_finished else "trained"
    measured = ("loss", "validation_loss", "exact_match", "score", "reward", "mixed_share", "ms_per_sample")
    shared = ("phase", *measured, "stepped_s")
    return TrainingPhase(
        state,
        step=max(progress.step, step_of(last) if last and state != "running" else 0),  # written with the heartbeats
        num_steps=num_steps or progress.num_steps,
        eta_s=max(progress.eta_s - silent_s, 0.0) if progress.eta_s is not None else None,
        silent_s=round(silent_s, 1),
        job=progress.worker.job,
        host=progress.worker.host,
        checkpoint=checkpoint,
        startup_seconds=startup_seconds,
        reason=progress.reason or ended_early,
        **{name: getattr(progress, name) for name in shared},
    )


def find_scores(folder: RunFolder, first: str) -> dict[str, Headline]:
    """The scores of all evaluations of a run, by split, `first` first; raises RunFolderError if a file is broken."""
    names = sorted(
        (path.stem for path in (folder.folder / "metrics").glob("*.json")), key=lambda name: (name != first, name)
    )
    return {name: head for name in names if (head := read_headline(folder, name))}


def find_unfinished(folder: RunFolder, records: Mapping[str, Sequence[Record]]) -> dict[str, tuple[int, int]]:
    """The questions answered so far, of all, of each evaluation of these records that has no result."""
    totals = {split: sum(len(record.turns) for record in of_split) for split, of_split in records.items()}
    answered = unfinished(folder.folder / "predictions")
    return {
        name: (number, totals[split])
        for name, number in answered.items()
        if (split := name.partition("-")[0]) in totals
    }


def _problems(cache: CachePhase, images: ImageIndex) -> Iterator[str]:
    """What a user has to fix before training."""
    if cache.lost:
        yield (
            f"{count(len(cache.lost), 'finished shard')} of {cache.report.folder} have no files, the first is "
            f"{cache.lost[0]}; run: {REPAIR_COMMAND}"
        )
    advice = f"training needs all images: {UNUSABLE_ADVICE}"
    if images.unusable:
        number, reason = count(len(images.unusable), "image"), next(iter(images.unusable.values()))
        yield f"{number} cannot be read, the first: {reason}; {advice}"
    if cache.is_planned and cache.report.num_quarantined:
        number = count(cache.report.num_quarantined, "image")
        yield f"{number} could not be encoded (see {cache.report.folder / QUARANTINE}); {advice}"


def _logs(cache: CachePhase, training: TrainingPhase) -> Iterator[str]:
    """Where to find the logs of slow or dead processes."""
    for worker in cache.report.workers:
        if worker.state:
            age = duration(worker.age_s)
            problem = f"worker {worker.worker} is {worker.state}, {age} after it claimed {worker.shard}"
            yield f"{problem}: {_log_of(worker.job, worker.host)}"
    if training.state in ("dead", "failed"):
        yield f"training is {training.state}: {_log_of(training.job, training.host)}"


def _log_of(job: str, host: str) -> str:
    log = find_log(job)
    return f"read {log}" if log else f"job {job}, no log in {LOGS}/" if job else f"it ran on {host}"


def find_log(job: str) -> Path | None:
    """The newest log of a Slurm job ("12") or of a task of an array ("12_3 (restart 1)")."""
    number = job.partition(" ")[0]
    if not number:
        return None
    patterns = [f"*-{number}.out"] if "_" in number else [f"*-{number}.out", f"*-{number}_*.out"]
    logs = [path for pattern in patterns for path in LOGS.glob(pattern)]
    return max(logs, key=lambda path: path.stat().st_mtime, default=None)


def next_command(run: RunFile, state: State, run_file: Path, assignments: tuple[str, ...]) -> str:
    arguments = (run_file, *(word for text in assignments for word in ("--set", text)))
    missing = state.missing()
    if not missing:
        begun = next((split for split in ("train", "val", "test") if split in state.unfinished), None)
        return shell(program(), "eval", run.output, *(["--split", begun] if begun else []))
    if state.is_under_way:
        return shell("watch", "-x", "-n", "10", program(), "status", *arguments)  # -x: without another shell
    if state.cache.lost:
        return shell(program(), "cache", "repair", *arguments)
    if state.training.state != "another run" and not assignments and shutil.which("sbatch") and SUBMIT.exists():
        return shell(SUBMIT, *arguments)
    if missing[0] in ("plan", "cache") or missing[0].startswith("cache "):
        return shell(program(), "cache", "build", *arguments)
    if missing[0] == "eval" and state.training.state in ("finished", "trained elsewhere"):
        return shell(program(), "eval", run.output, "--split", state.split)
    if state.training.state == "another run":
        return shell(program(), "train", *arguments, "--restart")
    resumes = state.is_trained or state.training.checkpoint
    return shell(program(), "train", *arguments, *(["--resume"] if resumes else []))
