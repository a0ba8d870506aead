"""Arms that answer each question with the adapter of its stage: the answers of other arms, brought together.

Design: the arms that are routed to answer all questions, so nothing is trained or answered again, and the answers are
theirs to the bit. The predictions are written beside the other runs, and made again whenever they are needed: they
never lag behind those that they are taken from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.errors import UsageError
from lookonce.eval.comparison.route import Label, check_labels, route
from lookonce.eval.comparison.runs import Run, find_predictions
from lookonce.eval.scores.metrics import Evaluation, Score
from lookonce.eval.scores.prediction import label, read_predictions, write_predictions
from lookonce.files import write_json
from lookonce.run.claim import RunClaim
from lookonce.run.folder import RunFolder
from lookonce.run.records import read_splits
from lookonce.status import find_scores
from lookonce.study.expand import StudyRun
from lookonce.study.file import StudyFile
from lookonce.study.state import read_state

PATIENCE_S = 30.0
"""How long to wait for another process that writes the same page or answers, which takes a few seconds."""


@dataclass(frozen=True)
class RoutedRun:
    """The answers of several runs with one seed, each to the questions with its label."""

    name: str
    arm: str
    seed: int
    by: Label
    runs: Mapping[str, StudyRun]
    """The run for each value of the label."""
    folder: RunFolder

    @property
    def split(self) -> str:
        return next(iter(self.runs.values())).run.eval.split

    @property
    def predictions(self) -> Path:
        return self.folder.predictions(self.split)

    def check(self) -> None:
        """Check that there is a run for each question of the split.

        Raises:
            LookonceError: there is none for some, or the records cannot be read.
        """
        records = read_splits(next(iter(self.runs.values())).run)[self.split]
        labels = [label(record.metadata.get(self.by)) for record in records for _ in record.turns]
        try:
            check_labels(labels, list(self.runs), self.by)
        except UsageError as error:
            raise UsageError(f"arm {self.arm}: {error}") from None

    def write(self) -> None:
        """Write predictions and scores; all of its runs must have answered.

        Raises:
            UsageError: questions have a label without a run, or the runs answered different questions.
        """
        with RunClaim(self.folder.folder, "lookonce study") as owner:
            owner.take(patience_s=PATIENCE_S)
            self._write()

    def _write(self) -> None:
        answers = {
            value: Run(one.arm, read_predictions(find_predictions(one.folder, self.split)), one.arm, one.seed)
            for value, one in self.runs.items()
        }
        evaluation = Evaluation.of(route(answers, self.by))
        write_predictions(self.predictions, evaluation.predictions)
        write_json(self.folder.metrics(self.split), evaluation.to_json())

    def score(self) -> Score | None:
        """The score that was written; None if there is none."""
        return find_scores(self.folder, self.split).get(self.split)

    def to_json(self) -> dict[str, Any]:
        runs = {value: one.name for value, one in self.runs.items()}
        values = {"run": self.name, "arm": self.arm, "seed": self.seed, "by": self.by, "runs": runs}
        return values | {"folder": self.folder.folder}


def routed_runs(study: StudyFile, runs: Mapping[str, StudyRun]) -> dict[str, RoutedRun]:
    """The arms of a study with a `route`, with each seed, by name."""
    found = {}
    for seed in study.seeds:
        for arm, section in study.routes.items():
            parts = {value: runs[f"{other}-{seed}"] for value, other in section.arms.items()}
            name = f"{arm}-{seed}"
            found[name] = RoutedRun(name, arm, seed, section.by, parts, RunFolder(study.output / name))
    return found


def write_routed(routed: Iterable[RoutedRun]) -> None:
    """Write the answers of those whose runs are complete."""
    for one in routed:
        if all(read_state(part).is_complete for part in one.runs.values()):
            one.write()
