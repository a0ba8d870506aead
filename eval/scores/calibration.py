"""Does the model know when it is wrong? Confidence beside rightness, from the log-probabilities of the answers.

Design: the confidence of an answer is its probability, the product over its tokens, so long answers have a low one.
Answers without a finite log-probability are left out and counted. Ties share their ranks and their rightness, so the
figures do not depend on the order of the questions. AUROC needs a ranking only; the expected calibration error takes 15
bins of equal width (Guo et al. 2017, arXiv 1706.04599); accuracy against coverage is that of the most confident part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lookonce.eval.scores.prediction import Prediction

NUM_BINS = 15


@dataclass(frozen=True)
class Calibration:
    """Confidence and rightness of some answers."""

    num_questions: int
    """Answers with a log-probability."""
    num_without: int
    """Answers without one, or with one that is not finite."""
    auroc: float | None
    """The chance that a right answer is more confident than a wrong one; None if there are only right or wrong ones."""
    ece: float
    """The expected calibration error: how far confidence and accuracy differ, as a mean over answers."""
    coverage: dict[str, float]
    """The exact match of the most confident tenth, two tenths, ... of the answers."""

    @classmethod
    def of(cls, predictions: Sequence[Prediction]) -> Calibration | None:
        """None if no answer has a log-probability."""
        known = [p for p in predictions if p.logprob is not None and math.isfinite(p.logprob)]
        if not known:
            return None
        right = np.array([p.is_right for p in known], float)
        logprobs = np.array([p.logprob for p in known], float)
        return cls(
            num_questions=len(known),
            num_without=len(predictions) - len(known),
            auroc=auroc(logprobs, right),
            ece=expected_error(np.exp(np.minimum(logprobs, 0)), right),
            coverage={f"{tenths / 10}": accuracy_at(tenths, logprobs, right) for tenths in range(1, 11)},
        )

    def text(self) -> str:
        """One line."""
        ranking = "" if self.auroc is None else f"AUROC {self.auroc:.3f}, "
        return f"{ranking}ECE {self.ece:.3f}; the most confident half is {self.coverage['0.5']:.1%} right"


def auroc(confidence: np.ndarray, right: np.ndarray) -> float | None:
    """The area under the ROC curve, by ranks (Mann-Whitney); ties count half."""
    num_right = int(right.sum())
    num_wrong = len(right) - num_right
    if not num_right or not num_wrong:
        return None
    _, place, counts = np.unique(confidence, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks @ right - num_right * (num_right + 1) / 2) / (num_right * num_wrong))


def expected_error(probability: np.ndarray, right: np.ndarray) -> float:
    """The mean over answers of |accuracy - confidence| of the answer's bin; bins include their upper bound."""
    bins = np.clip(np.ceil(probability * NUM_BINS) - 1, 0, NUM_BINS - 1).astype(int)
    difference = np.bincount(bins, right - probability, NUM_BINS)
    return float(np.abs(difference).sum() / len(right))


def accuracy_at(tenths: int, confidence: np.ndarray, right: np.ndarray) -> float:
    """The accuracy of the most confident tenths of the answers, rounded up to whole answers."""
    _, place, counts = np.unique(-confidence, return_inverse=True, return_counts=True)
    expected = (np.bincount(place, right) / counts)[np.sort(place)]  # of a draw among equally confident answers
    return float(expected[: -(-tenths * len(right) // 10)].mean())
