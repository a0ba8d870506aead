"""Exact match and the majority baseline by question, category, source and stage, and their means over these groups.

Design: a mean over groups (macro) gives each group the same weight, so that a question that is asked often does not
hide the others. A prediction whose record has no category is in no category; source and stage likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from lookonce.eval.scores.prediction import Prediction

GROUPINGS = ("question", "category", "source", "stage")
"""What predictions are grouped by: fields of `Prediction`."""
MAX_GROUPS = 40
"""The most groups of a grouping that are shown, since question texts may all be different."""


@dataclass(frozen=True)
class Score:
    """Exact match and majority baseline over some questions, as shares."""

    num_questions: int
    exact_match: float
    majority: float


def score(predictions: Sequence[Prediction]) -> Score:
    """Exact match and majority baseline, as shares."""
    count = len(predictions)
    right, guessed = sum(p.is_right for p in predictions), sum(p.is_majority_right for p in predictions)
    return Score(count, right / max(count, 1), guessed / max(count, 1))


def scores_by(predictions: Iterable[Prediction], grouping: str) -> dict[str, Score]:
    """The scores of the groups, by name."""
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        if (name := getattr(prediction, grouping)) is not None:
            groups.setdefault(name, []).append(prediction)
    return {name: score(groups[name]) for name in sorted(groups)}


def macro(scores: Iterable[Score]) -> Score:
    """The means over groups, and the number of their questions; there must be a group."""
    scores = list(scores)
    return Score(
        sum(one.num_questions for one in scores),
        fmean(one.exact_match for one in scores),
        fmean(one.majority for one in scores),
    )
