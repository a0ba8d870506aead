"""The questions that all runs answered: joined by image key, question and turn, and refused if they are not the same.

Q questions, R runs.

Design: a difference between runs that answered different questions may come from the questions, so there is no inner
join. Rows of earlier versions have no image keys; if a run has such rows, all runs are joined by the paths of the
images. Where a question is asked twice about an image, not the order tells the two apart but their references, the
questions before them, and last where their records were read from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import UsageError
from lookonce.eval.comparison.metric import Metric, is_exact_match_poor, score_each
from lookonce.eval.comparison.runs import Run
from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.statistics import Clusters, clusters_of
from lookonce.text import count, listed, nfc, quoted

Asked = tuple[tuple[str, ...], str, int]
"""Images, question, turn."""
Key = tuple[tuple[str, ...], str, int, int]
"""The same, and a number that tells questions apart for which it is the same."""
MOST = 3
"""Examples in a message."""


@dataclass(frozen=True)
class Joined:
    """The answers of some runs to the same questions."""

    right_QR: NDArray[np.float64]
    """Whether each question is answered right by each run: 1 or 0."""
    score_QR: NDArray[np.float64]
    """What the answers score by the metric; with exact match the same."""
    majority_QR: NDArray[np.float64]
    """What the majority answers score. Runs with other training records have other ones."""
    clusters: Clusters
    is_exact_match_poor: bool


def join(runs: Sequence[Run], metric: Metric = "exact_match") -> Joined:
    """What the answers of each run score, in one order.

    Raises:
        UsageError: they answered different questions, or were scored with different references; names the differences.
    """
    rows = in_one_order(runs)
    scores = [score_each(row, metric) for row in rows]
    return Joined(
        np.array([[one.is_right for one in row] for row in rows], dtype=np.float64).T,
        np.array([model for model, _ in scores]).T,
        np.array([majority for _, majority in scores]).T,
        clusters_of([one.sources for one in rows[0]]),
        is_exact_match_poor(rows),
    )


def in_one_order(runs: Sequence[Run]) -> list[list[Prediction]]:
    """The predictions of each run, in the order of the first one's.

    Raises:
        UsageError: they answered different questions, or were scored with different references; names the differences.
    """
    has_keys = all(one.image_keys or not one.images for run in runs for one in run.predictions)
    asked = [_by_key(run.predictions, has_keys) for run in runs]
    differences = [
        line
        for run, by_key in zip(runs[1:], asked[1:], strict=True)
        for line in _differences(runs[0].name, asked[0], run.name, by_key)
    ]
    if differences:
        raise UsageError(
            "\n".join(["the runs cannot be compared, because they answered different questions:", *differences])
            + "\nevaluate them on the same records, with: lookonce eval RUN --split SPLIT"
        )
    return [[by_key[key] for key in asked[0]] for by_key in asked]


def _by_key(predictions: Sequence[Prediction], has_keys: bool) -> dict[Key, Prediction]:
    """The predictions by their keys, in their order."""
    same: dict[Asked, list[int]] = {}
    for number, one in enumerate(predictions):
        asked = (one.image_keys if has_keys else one.images, nfc(one.question), one.turn)
        same.setdefault(asked, []).append(number)
    keys: dict[int, Key] = {}
    for asked, numbers in same.items():
        numbers.sort(key=lambda number: _told_apart(predictions[number]))
        keys |= {number: (*asked, place) for place, number in enumerate(numbers)}
    return {keys[number]: one for number, one in enumerate(predictions)}


def _told_apart(one: Prediction) -> tuple[list[str], list[str], str]:
    """What tells a question from another with the same text; own answers before it are others in each run."""
    return sorted(_references(one)), [nfc(turn.question) for turn in one.earlier], one.origin


def _differences(
    name: str, mine: dict[Key, Prediction], other_name: str, theirs: dict[Key, Prediction]
) -> Iterator[str]:
    """What differs between the questions of two runs: a line each, with a number and some examples."""
    for lacking, has, absent in (
        (other_name, name, [one for key, one in mine.items() if key not in theirs]),
        (name, other_name, [one for key, one in theirs.items() if key not in mine]),
    ):
        if absent:
            yield f"  {lacking} lacks {count(len(absent), 'question')} of {has}: {_examples(absent)}"
    scored = [(one, theirs[key]) for key, one in mine.items() if key in theirs]
    if changed := [one for one, other in scored if _references(one) != _references(other)]:
        yield f"  the references of {count(len(changed), 'question')} differ from {name} to {other_name}: " + _examples(
            changed
        )


def _references(one: Prediction) -> set[str]:
    return {nfc(text).strip() for text in (one.answer, *one.references)}


def _examples(predictions: Sequence[Prediction]) -> str:
    return listed([f"{quoted(one.question, 50)} ({one.origin})" for one in predictions], MOST)
