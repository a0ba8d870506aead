"""Exact match of one run with 95 % intervals: of all questions, and of each group.

Design: of a grouping the groups with most questions are shown, since question texts may all be different.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookonce.eval.scores.prediction import GROUPINGS, MAX_GROUPS, Prediction
from lookonce.eval.statistics import Clusters, Interval, clusters_of, share_interval

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """The score of some questions."""

    num_questions: int
    exact_match: float
    interval: Interval | None
    """None if there are too few images."""
    majority: float

    @property
    def gain(self) -> float:
        """What the model scores above the majority baseline."""
        return self.exact_match - self.majority


@dataclass(frozen=True)
class RunScores:
    """The scores of a run."""

    overall: Scored
    num_images: int
    """Images; those that share a question count as one."""
    groups: dict[str, dict[str, Scored]]
    """The groups with most questions by grouping, by name."""
    num_groups: dict[str, int]
    """All groups of each grouping."""


def score_run(predictions: Sequence[Prediction]) -> RunScores:
    """Score the answers of a run."""
    clusters = clusters_of([one.sources for one in predictions])
    right_Q, guessed_Q = (
        np.array([getattr(one, name) for one in predictions], dtype=np.float64)
        for name in ("is_right", "is_majority_right")
    )
    members = {(by, name): _members(predictions, by, name) for by in GROUPINGS for name in _largest(predictions, by)}
    scored = {key: _scored(right_Q[is_in_Q], guessed_Q[is_in_Q], clusters[is_in_Q]) for key, is_in_Q in members.items()}
    return RunScores(
        overall=_scored(right_Q, guessed_Q, clusters),
        num_images=int(clusters.max(initial=-1)) + 1,
        groups={by: {name: one for (other, name), one in scored.items() if other == by} for by in GROUPINGS},
        num_groups={by: len(_sizes(predictions, by)) for by in GROUPINGS},
    )


def _sizes(predictions: Sequence[Prediction], by: str) -> Counter[str]:
    """The number of questions of each group; questions without a group do not count."""
    return Counter(name for one in predictions if (name := getattr(one, by)) is not None)


def _largest(predictions: Sequence[Prediction], by: str) -> list[str]:
    return [name for name, _ in _sizes(predictions, by).most_common(MAX_GROUPS)]


def _members(predictions: Sequence[Prediction], by: str, name: str) -> NDArray[np.bool_]:
    return np.array([getattr(one, by) == name for one in predictions])


def _scored(right_Q: Shares, guessed_Q: Shares, clusters: Clusters) -> Scored:
    return Scored(len(right_Q), float(right_Q.mean()), share_interval(right_Q, clusters), float(guessed_Q.mean()))
