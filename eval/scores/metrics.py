"""The evaluation of some predictions: the headline, its groups, and the figures beside it.

Design: the headline is strict exact match beside the majority baseline: the most frequent training answer of each
question, given without looking at any image. Everything else is computed at once and kept under keys of its own, so
the keys of the headline never change. The cost is below a second for 9,000 questions, without the text metrics.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from lookonce.eval.scores import texts
from lookonce.eval.scores.calibration import Calibration
from lookonce.eval.scores.counts import Counts, TrainingAnswers
from lookonce.eval.scores.figures import Figure, Sizes, figures
from lookonce.eval.scores.groups import GROUPINGS, Score, score, scores_by
from lookonce.eval.scores.interval import exact_match_interval
from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.statistics.bootstrap import Interval
from lookonce.text import count, rows, table

__all__ = ["Evaluation", "Score"]

IN_DETAIL = {"exact_match_lower", "open_token_recall", "token_recall", "label_precision", "label_recall"}
"""Figures that are in the file of the metrics and not in the text."""


@dataclass(frozen=True)
class Evaluation:
    """Predictions and their scores: overall, by group, and by all other metrics."""

    predictions: list[Prediction]
    overall: Score
    interval: Interval | None
    """The 95 % interval of the exact match of all; None if all questions are about one image."""
    groups: dict[str, dict[str, Score]]
    """The scores by question text, category, source and stage; empty where no record has one."""
    figures: dict[str, Figure]
    counts: Counts
    calibration: Calibration | None
    """None without log-probabilities."""
    text_metrics: str = field(default_factory=texts.libraries)
    """The libraries of the text metrics, or what to install."""

    @classmethod
    def of(
        cls, predictions: list[Prediction], training: TrainingAnswers | None = None, sizes: Sizes | None = None
    ) -> Evaluation:
        """Score predictions; `training` are the answers of the training records, `sizes` those of images by key."""
        groups = {name: scores_by(predictions, name) for name in GROUPINGS}
        return cls(
            predictions=predictions,
            overall=score(predictions),
            interval=exact_match_interval(predictions),
            groups=groups,
            figures=figures(predictions, groups, sizes or {}),
            counts=Counts.of(predictions, training),
            calibration=Calibration.of(predictions),
        )

    @property
    def by_question(self) -> dict[str, Score]:
        return self.groups["question"]

    def text(self) -> str:
        """One line per question text, the overall score last; then the other figures."""
        scores = [*self.by_question.items(), ("all", self.overall)]
        lines = [[name, f"{s.num_questions:,}", f"{s.exact_match:.1%}", f"{s.majority:.1%}"] for name, s in scores]
        if self.interval:
            lines[-1][2] += f" [{self.interval.in_percent()}]"
        others = [figure.line() for key, figure in self.figures.items() if key not in IN_DETAIL]
        blocks = [
            table(("question", "asked", "exact match", "majority"), lines),
            table(("other metrics", "asked", "model", "majority", "at most"), others) if others else "",
            rows(self._notes()),
        ]
        return "\n\n".join(filter(None, blocks))

    def _notes(self) -> list[tuple[str, str]]:
        notes = [("answers", self.counts.text())]
        if self.calibration:
            notes.append(("confidence", self.calibration.text()))
            if self.calibration.num_without:
                notes.append(("", f"{count(self.calibration.num_without, 'answer')} without a log-probability"))
        if self.text_metrics == texts.NOT_INSTALLED:
            notes.append(("BLEU etc.", self.text_metrics))
        return notes

    def to_json(self) -> dict[str, Any]:
        by_group = {
            f"by_{name}": {one: asdict(value) for one, value in scores.items()} for name, scores in self.groups.items()
        }
        return {
            "overall": asdict(self.overall),
            "exact_match_interval": self.interval,
            **by_group,
            "metrics": {key: figure.to_json() for key, figure in self.figures.items()},
            "counts": asdict(self.counts),
            "calibration": self.calibration and asdict(self.calibration),
            "text_metrics": self.text_metrics,
        }
