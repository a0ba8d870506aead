"""The state of a run's phases, as text in full, as one line of a log and as a row of a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lookonce.cache.build.progress import StatusReport, WorkerStatus, workers_table
from lookonce.eval.scores.prediction import Score
from lookonce.text import count, duration, rows, size

TrainingState = Literal["not begun", "running", "dead", "stopped", "failed", "trained", "finished", "another run"]


@dataclass(frozen=True)
class CachePhase:
    """State of the plan and the cache."""

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
        return "; ".join([f"{done} in {shards}, {size(report.num_bytes)}", *self._pace()])

    def plan_text(self) -> str:
        if not self.num_files:
            return "nothing to encode: the records name no images"
        if not self.num_shards:
            return f"none yet; the records name {count(self.num_files, 'image file')}"
        planned = f"{count(self.num_shards, 'shard')} for {count(self.report.num_images, 'image')}"
        return planned if self.is_planned else f"{planned}; more images need planning"

    def short(self) -> str:
        return f"{self.report.num_done:,}/{self.report.num_images:,} images" if self.num_shards else "no plan"

    def line(self) -> str:
        states = [worker.state for worker in self.report.workers]
        wrong = [f"{states.count(state)} {state}" for state in ("slow", "dead") if state in states]
        workers = [", ".join([count(len(states), "worker"), *wrong])] if states else []
        return ", ".join([f"cache {self.short()}", *self._pace(), *workers])

    def _pace(self) -> list[str]:
        report = self.report
        if report.eta_s is None:
            return []
        return [f"{report.images_per_second:.1f} images/s, done in {duration(report.eta_s)}"]


@dataclass(frozen=True)
class TrainingPhase:
    """State of the training: how far it is, or how it ended."""

    state: TrainingState
    phase: str = ""
    """What a running training is doing: loading, training or evaluating."""
    step: int = 0
    num_steps: int = 0
    """0 if not known."""
    loss: float | None = None
    validation_loss: float | None = None
    exact_match: float | None = None
    """The last one that was measured while training."""
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
    """Why it stopped or failed."""
    startup_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each piece of work before the first step, of a finished training."""

    def text(self) -> str:
        """In full."""
        texts = {
            "running": [self._where(), *self._figures(), *self._heartbeat()],
            "dead": [f"dead at {self._where()}", *self._heartbeat(), self._resume()],
            "stopped": [self.reason.partition(";")[0] or f"stopped at {self._where()}", self._resume()],
            "failed": [f"failed at {self._where()}: {self.reason}", self._resume()],
            "trained": [f"trained for {count(self.num_steps, 'step')}, adapter saved"],
            "finished": [f"finished: {count(self.num_steps, 'step')}", *self._figures()],
        }.get(self.state, [self.state])
        return ", ".join(filter(None, texts))

    def short(self) -> str:
        """In a few words."""
        if self.state == "running":
            return self._where()
        return f"{self.state} at {self._where()}" if self.state in ("dead", "stopped", "failed") else self.state

    def line(self) -> str:
        return ", ".join(filter(None, [f"training {self.short()}", *self._figures()]))

    def _where(self) -> str:
        if not self.num_steps or self.phase not in ("", "training"):
            return self.phase or "an unknown step"
        return f"step {self.step:,} of {self.num_steps:,}"

    def _figures(self) -> list[str]:
        """Losses and rate, of a running or finished training."""
        if self.state not in ("running", "finished"):
            return []
        return [
            f"loss {self.loss:.4f}" if self.loss is not None else "",
            f"validation loss {self.validation_loss:.4f}" if self.validation_loss is not None else "",
            f"exact match {self.exact_match:.1%}" if self.exact_match is not None else "",
            f"{self.ms_per_sample:.1f} ms per sample" if self.ms_per_sample is not None else "",
            f"steps done in {duration(self.eta_s)}" if self.eta_s is not None and self.phase == "training" else "",
        ]

    def _heartbeat(self) -> list[str]:
        where = f" (job {self.job})" if self.job else f" on {self.host}"
        return [f"last heartbeat {duration(self.silent_s or 0)} ago{where}"]

    def _resume(self) -> str:
        return f"--resume continues from {self.checkpoint}" if self.checkpoint else "no checkpoint to resume from"


@dataclass(frozen=True)
class State:
    """State of all phases of a run."""

    output: Path
    cache: CachePhase
    training: TrainingPhase
    scores: dict[str, Score]
    """Scores of all evaluations of the adapter, by split."""
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
        is_planned, num_pending = self.cache.is_planned, self.cache.num_pending
        phases = {
            "plan": not is_planned,
            "cache": not is_planned,
            f"cache {num_pending}": is_planned and num_pending > 0,
            "train": not self.is_trained,
            "eval": not self.is_evaluated,
        }
        return [phase for phase, is_missing in phases.items() if is_missing]

    @property
    def is_under_way(self) -> bool:
        """Whether a training or a worker is running."""
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
            f"{split}: {score.exact_match:.1%} exact match on {count(score.num_questions, 'question')}; "
            f"always the majority answer: {score.majority:.1%}"
            for split, score in self.scores.items()
        ]
        for name, (num_answered, num_questions) in self.unfinished.items():
            texts.append(f"{name}: {num_answered:,} of {count(num_questions, 'question')} answered so far")
        texts = texts or ["not yet"]
        return list(zip(["evaluation", *[""] * (len(texts) - 1)], texts, strict=True))

    def line(self) -> str:
        """The state as one line of a log."""
        return "; ".join([self.cache.line(), self.training.line(), f"evaluation {self._score()}"])

    def row(self) -> tuple[str, ...]:
        """The state as a row of a table of runs, under `HEADER`."""
        return str(self.output), self.cache.short(), self.training.short(), self._score(), self._missing()

    def _score(self) -> str:
        if score := self.scores.get(self.split):
            return f"{score.exact_match:.1%} (majority {score.majority:.1%})"
        answered = self.unfinished.get(self.split)
        return "{:,} of {:,} answered".format(*answered) if answered else "not yet"

    def _missing(self) -> str:
        return ", ".join(self.missing()) or "nothing"


HEADER = ("run", "cache", "training", "exact match", "missing")
