"""What is known of the runs of a report: their folders, their answers and the scores that were written.

Design: everything is read from the files of the run folder, and each file may be absent, because a run may be
unfinished or of an earlier version. What a file lacks is said in the part that needs it. Neither torch nor the model is
loaded. A predictions file outside a run folder has answers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lookonce.errors import UsageError
from lookonce.eval.answers.files import AnsweringCost
from lookonce.eval.comparison.runs import Run, find_predictions, read_runs, short_names
from lookonce.eval.scores.headline import BASELINES
from lookonce.eval.scores.metrics import Evaluation, read_metrics
from lookonce.report.data import DataFacts
from lookonce.report.scores import RunScores, score_run
from lookonce.run.config import RunFile
from lookonce.run.folder import AGAIN, RECORD, Environment, RunFolder, read_form
from lookonce.run.log_file import Curves, read_curves, read_lines
from lookonce.status import TrainingPhase, find_training
from lookonce.summary import Summary
from lookonce.text import listed


@dataclass(frozen=True)
class ReportedRun:
    """One run of a report."""

    name: str
    split: str
    """The split whose answers are reported; empty for a predictions file outside a run folder."""
    answers: Run | None
    """None if the split is not evaluated."""
    folder: RunFolder | None
    settings: RunFile | None
    known_data: DataFacts | None = None
    """What a training that has just ended knows of its records; otherwise they are read."""
    known_summary: dict[str, Any] | None = None
    known_metrics: dict[str, Any] | None = None
    """The evaluation beside another majority baseline than that of the run's own records; otherwise it is read."""

    @property
    def has_context(self) -> bool:
        """Whether its questions follow answers to earlier ones (`data.context`), and are those of a split."""
        data = self.settings.data if self.settings else None
        return data is not None and data.context is not None and hasattr(data, self.split)

    @cached_property
    def scores(self) -> RunScores | None:
        return score_run(self.answers.predictions) if self.answers else None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The evaluation of the answers as JSON; computed again if it was written by an earlier version."""
        if self.known_metrics is not None:
            return self.known_metrics
        written = read_metrics(self.folder, self.split) if self.folder else {}
        if self.answers is None or "baselines" in written:
            return written
        return Evaluation.of(self.answers.predictions).to_json()

    @cached_property
    def conditions(self) -> dict[str, dict[str, Any]]:
        """The metrics of the baselines that a model has answered, by their keys."""
        if self.folder is None:
            return {}
        known = [key for key in BASELINES if key in self.metrics.get("baselines", {})]
        return {key: read_metrics(self.folder, f"{self.split}-{key}") for key in known}

    @cached_property
    def curves(self) -> Curves:
        return read_curves(self.folder.log) if self.folder else Curves()

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        return list(read_lines(self.folder.log)) if self.folder else []

    @cached_property
    def summary(self) -> dict[str, Any]:
        if self.known_summary or not (self.folder and self.folder.is_finished):
            return self.known_summary or {}
        return Summary.read(self.folder).to_json()

    @cached_property
    def trained(self) -> dict[str, Any]:
        return asdict(self.folder.read_trained()) if self.folder and self.folder.trained.exists() else {}

    @cached_property
    def training(self) -> TrainingPhase | None:
        """How far the training is; None without a run folder, or if it is this process that has just trained."""
        if self.folder is None or self.settings is None or self.known_summary:
            return None
        return find_training(self.folder, self.settings.cache.claim_s)

    @property
    def is_training(self) -> bool:
        return self.training is not None and self.training.state == "running"

    @cached_property
    def answering(self) -> dict[str, Any]:
        return asdict(AnsweringCost.read(self.folder.answering(self.split))) if self.folder else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        if not (self.folder and (path := self.folder.folder / "environment.json").exists()):
            return {}
        return asdict(read_form(path, Environment, AGAIN))

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The hashes of what the run read."""
        return self.folder.recorded_inputs() if self.folder else {}

    @cached_property
    def data(self) -> DataFacts:
        if self.known_data:
            return self.known_data
        return DataFacts.read(self.settings, str(self.inputs.get("cache", ""))) if self.settings else DataFacts()


def open_runs(paths: Sequence[Path], split: str | None = None) -> list[ReportedRun]:
    """The runs at some paths: run folders, run files, or predictions files. `split` is by default their `eval.split`.

    Raises:
        UsageError: the runs' own splits differ, or the predictions of a split that is named do not exist.
        LookonceError: a path is none of these, or predictions are damaged.
    """
    opened = [_open(path, name, split) for path, name in zip(paths, short_names(paths), strict=True)]
    folders = [run for path, run in zip(paths, opened, strict=True) if not _is_file(path)]
    if len({run.split for run in folders}) > 1:
        said = listed([f"{run.name}: {run.split}" for run in folders])
        raise UsageError(f"the runs were evaluated on different splits ({said}); choose one with --split")
    return opened


def _open(path: Path, name: str, split: str | None) -> ReportedRun:
    is_file, folder = _is_file(path), _folder_of(path)
    settings = folder.read_run() if folder else None
    chosen = path.stem if is_file else split or (settings.eval.split if settings else "")
    if folder and split and not is_file:
        find_predictions(folder, split)
    is_answered = is_file or (folder is not None and folder.predictions(chosen).exists())
    answers = replace(read_runs([path], chosen)[0], name=name) if is_answered else None
    return ReportedRun(name, chosen if folder else "", answers, folder, settings)


def _is_file(path: Path) -> bool:
    """Whether a path is a predictions file."""
    return path.suffix == ".jsonl"


def _folder_of(path: Path) -> RunFolder | None:
    """The run folder of a path; None for a predictions file elsewhere."""
    if not _is_file(path):
        return RunFolder.find(path)
    above = path.absolute().parent.parent
    return RunFolder(above) if (above / RECORD).exists() else None
