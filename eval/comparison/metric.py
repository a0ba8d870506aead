"""What a comparison is about: exact match, or for sentences the words that answers have in common with references.

Design: only metrics that give each question a number, because images are drawn with their questions. Exact match is the
headline, and the metric unless another is named: to choose the one that shows a difference is no comparison. Where it
tells answers hardly apart, this is said. F1 of words needs no other library, and orders models as ROUGE-1 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Literal

from lookonce.eval.scores.match import word_overlap
from lookonce.eval.scores.prediction import Prediction

Metric = Literal["exact_match", "token_f1"]
NAMES: dict[Metric, str] = {"exact_match": "exact match", "token_f1": "F1 of words"}
FEW_RIGHT = 0.05
"""The least share of right answers of some run with which exact match says something."""
SENTENCE = 5
"""The median number of words of the references from which they count as sentences, about which it says little."""


def score_each(predictions: Sequence[Prediction], metric: Metric) -> tuple[list[float], list[float]]:
    """What the model's and the majority answer to each question score."""
    if metric == "exact_match":
        return [float(one.is_right) for one in predictions], [float(one.is_majority_right) for one in predictions]
    overlap = cache(word_overlap)  # the same answer to the same question is scored once
    predictions = [one.in_nfc for one in predictions]
    right = [(one.answer, *one.references) for one in predictions]
    model, majority = (
        [overlap(given, references).f1 for given, references in zip(answers, right, strict=True)]
        for answers in ([one.predicted for one in predictions], [one.majority for one in predictions])
    )
    return model, majority


def is_exact_match_poor(rows: Sequence[Sequence[Prediction]]) -> bool:
    """Whether exact match says little about the answers of some runs to the same questions."""
    are_sentences = median(len(one.answer.split()) for one in rows[0]) >= SENTENCE
    return are_sentences or all(sum(one.is_right for one in row) < FEW_RIGHT * len(row) for row in rows)
