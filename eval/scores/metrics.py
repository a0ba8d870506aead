"""The evaluation of some predictions: the headline, its groups, and the figures beside it.

Design: the headline is strict exact match beside the majority baseline: the most frequent training answer of each
question, given without looking at any image; and beside the baselines that a model has answered. Everything else is
computed at once and kept under keys of its own, so the keys of the headline never change. The cost is about a second
for 9,000 questions of 975 images, without the text metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lookonce.eval.scores import texts
from lookonce.eval.scores.counts import Counts, TrainingAnswers
from lookonce.eval.scores.figures import Figure, Sizes, figures
from lookonce.eval.scores.groups import GROUPINGS, MAX_GROUPS, Score, score, scores_by
from lookonce.eval.scores.headline import HEADER, BaselineAnswers, BaselineScore, Headline
from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.statistics import MIN_CLUSTERS, Interval
from lookonce.run.folder import RunFolder, read_form
from lookonce.text import rows, shell, table

__all__ = ["Evaluation", "Score"]


IN_DETAIL = {"exact_match_lower", "open_token_recall", "token_recall", "label_precision", "label_recall"}
"""Figures that are in the file of the metrics and not in the text."""


@dataclass(frozen=True)
class Evaluation:
    """Predictions and their scores: overall, by group, and by all other metrics."""

    predictions: list[Prediction]
    overall: Score
    interval: Interval | None
    """The 95 % interval of the exact match of all; None if there are too few images."""
    baselines: dict[str, BaselineScore]
    """Exact match of the baselines that are known, by their keys."""
    groups: dict[str, dict[str, Score]]
    """The scores by question text, category, source and stage; empty where no record has one."""
    figures: dict[str, Figure]
    counts: Counts
    text_metrics: str = field(default_factory=texts.libraries)
    """The libraries of the text metrics, or what to install."""

    @classmethod
    def of(
        cls,
        predictions: list[Prediction],
        training: TrainingAnswers | None = None,
        sizes: Sizes | None = None,
        baselines: BaselineAnswers | None = None,
    ) -> Evaluation:
        """Score predictions, beside the majority and what other `baselines` answered.

        `training` are the answers of the training records, `sizes` those of images by key.
        """
        compared = [one.in_nfc for one in predictions]
        groups = {name: scores_by(compared, name) for name in GROUPINGS}
        headline = Headline.of(compared, baselines or {})
        return cls(
            predictions=predictions,
            overall=score(compared),
            interval=headline.interval,
            baselines=headline.baselines,
            groups=groups,
            figures=figures(compared, groups, sizes or {}),
            counts=Counts.of(compared, training),
        )

    @property
    def by_question(self) -> dict[str, Score]:
        return self.groups["question"]

    def text(self, beside: Mapping[str, Mapping[str, Any]] | None = None) -> str:
        """One line per question text, the overall score last; then the baselines and the other figures.

        `beside` has the evaluations of baselines as JSON, which are shown beside the other figures.
        """
        known = {key: value.get("metrics", {}) for key, value in (beside or {}).items()}
        others = [
            figure.line([values.get(key, {}).get("model") for values in known.values()])
            for key, figure in self.figures.items()
            if key not in IN_DETAIL
        ]
        header = ("other metrics", "asked", "model", "majority", *known, "at most")
        blocks = [
            self._by_question(),
            table(HEADER, [one.line(key) for key, one in self.baselines.items()]) if self.baselines else "",
            table(header, others) if others else "",
            rows(self._notes()),
        ]
        return "\n\n".join(filter(None, blocks))

    def _by_question(self) -> str:
        """The table of question texts; of many, those that are asked most."""
        most = sorted(self.by_question, key=lambda name: -self.by_question[name].num_questions)[:MAX_GROUPS]
        shown = {name: one for name, one in self.by_question.items() if name in most}
        scores = [*shown.items(), ("all", self.overall)]
        lines = [[name, f"{s.num_questions:,}", f"{s.exact_match:.1%}", f"{s.majority:.1%}"] for name, s in scores]
        header = ["question", "asked", "exact match", "majority"]
        if self.interval:
            lines[-1][2] += f" [{self.interval.in_percent()}]"
        if more := len(self.by_question) - len(shown):
            lines.insert(-1, [f"{more:,} other question texts", *[""] * (len(header) - 1)])
        return table(header, lines)

    def _notes(self) -> list[tuple[str, str]]:
        notes = [("answers", self.counts.text())]
        if self.predictions and self.interval is None:
            notes.append(("interval", f"none, because the questions are about fewer than {MIN_CLUSTERS} images"))
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
            "baselines": {key: asdict(one) for key, one in self.baselines.items()},
            **by_group,
            "metrics": {key: figure.to_json() for key, figure in self.figures.items()},
            "counts": asdict(self.counts),
            "text_metrics": self.text_metrics,
        }


@dataclass(frozen=True)
class WrittenMetrics:
    """The fields of metrics/SPLIT.json that are read again."""

    overall: Score
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


def read_metrics(folder: RunFolder, name: str) -> dict[str, Any]:
    """What `Evaluation.to_json` gave for a split or a baseline of it; empty if that was not evaluated.

    Raises:
        RunFolderError: the file is broken; names it.
    """
    path = folder.metrics(name)
    if not path.exists():
        return {}
    split, _, baseline = name.partition("-")
    again = shell("lookonce", "eval", folder.folder, "--split", split, *(["--baselines"] if baseline else []))
    advice = f"write it again with: {again}"
    read_form(path, WrittenMetrics, advice)
    return read_form(path, dict[str, Any], advice)
