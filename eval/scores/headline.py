"""The headline: exact match with its interval, and how much higher it is than each baseline.

Q questions.

Design: a baseline answers the same questions, so the interval is that of the difference in pairs, over images. With
shuffled images a question is about two images; it counts for its own, because all questions would be connected through
the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.statistics import Interval, clusters_of, difference_interval, share_interval

Baseline = Literal["untuned", "shuffled", "blank", "true", "none"]
"""The baselines that a model answers."""
BASELINES: tuple[Baseline, ...] = get_args(Baseline)[:3]
"""Those of every run."""
IN_CONTEXT: tuple[Baseline, ...] = get_args(Baseline)[3:]
"""Those of a run with `data.context`: true answers to earlier questions in the prompts, and none."""
NAMES = {
    "majority": "majority",
    "majority_in_context": "majority given the context",
    "untuned": "untuned model",
    "shuffled": "shuffled images",
    "blank": "blank images",
    "true": "true answers in context",
    "none": "no context",
}
"""The names of all baselines in tables."""
HEADER = ("baseline", "exact match", "model is higher by", "95% interval")
BaselineAnswers = Mapping[Baseline, Sequence[str]]
"""The answers of baselines, in the order of the questions."""


@dataclass(frozen=True)
class BaselineScore:
    """What a baseline scores on the questions of a run."""

    exact_match: float
    difference: float
    """The exact match of the run less that of the baseline."""
    interval: Interval | None
    """The 95 % interval of the difference; None if there are too few images."""

    def line(self, key: str) -> tuple[str, str, str, str]:
        """The line of a table below `HEADER`."""
        interval = self.interval.in_percent() if self.interval else "none"
        return NAMES[key], f"{self.exact_match:.1%}", f"{100 * self.difference:+.1f}", interval


@dataclass(frozen=True)
class Headline:
    """The interval of the exact match of all, and the baselines by their keys."""

    interval: Interval | None = None
    """The 95 % interval; None if there are too few images."""
    baselines: dict[str, BaselineScore] = field(default_factory=dict)

    @classmethod
    def of(cls, predictions: Sequence[Prediction], answers: BaselineAnswers) -> Headline:
        """The headline of some predictions, with the baselines that `answers` has beside the majorities."""
        if not predictions:
            return cls()
        right_Q = np.array([one.is_right for one in predictions], dtype=np.float64)
        clusters = clusters_of([one.sources for one in predictions])

        def baseline(texts: Sequence[str]) -> BaselineScore:
            right = [one.accepts(text) for one, text in zip(predictions, texts, strict=True)]
            baseline_Q = np.array(right, dtype=np.float64)
            score = float(baseline_Q.mean())
            return BaselineScore(
                score, float(right_Q.mean()) - score, difference_interval(right_Q - baseline_Q, clusters)
            )

        return cls(
            share_interval(right_Q, clusters),
            {key: baseline(texts) for key, texts in (_majorities(predictions) | dict(answers)).items()},
        )


def _majorities(predictions: Sequence[Prediction]) -> dict[str, Sequence[str]]:
    """The majority answers; in conversations also those given the context. A first turn has no context."""
    given: dict[str, Sequence[str]] = {"majority": [one.majority for one in predictions]}
    if any(one.majority_in_context is not None for one in predictions):
        in_context = [(one.majority_in_context, one.majority) for one in predictions]
        given["majority_in_context"] = [plain if known is None else known for known, plain in in_context]
    return given
