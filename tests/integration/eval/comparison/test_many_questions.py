"""A comparison of three runs on as many questions and images as the validation split of Kvasir-VQA has."""

from __future__ import annotations

import time

import numpy as np
import pytest

from lookonce.eval.compare import compare
from lookonce.eval.join import Run
from lookonce.eval.scores.prediction import Prediction

IMAGES, QUESTIONS = 975, 9000
WORDS = np.array([f"word{number}" for number in range(40)])


def in_sentences(name: str, share: float) -> Run:
    """Questions with references of eight words, of which each answer has about this share."""
    rng, kept = np.random.default_rng(0), np.random.default_rng(int(100 * share))
    truths = WORDS[rng.random((QUESTIONS, len(WORDS))).argsort(axis=1)[:, :8]]
    given = np.where(kept.random(truths.shape) < share, truths, "else")
    rows = [
        Prediction(
            f"a:{number}", (f"{number % IMAGES}.jpg",), f"q{number // IMAGES}", " ".join(one), " ".join(other), "no"
        )
        for number, (one, other) in enumerate(zip(truths, given, strict=True))
    ]
    return Run(name, rows, "", None)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [in_sentences(name, share) for name, share in (("a", 0.4), ("b", 0.5), ("c", 0.6))]


@pytest.mark.parametrize("metric", ["exact_match", "token_f1"])
def test_9000_questions_of_975_images_are_compared_in_seconds(runs, metric):
    start = time.perf_counter()
    compare(runs, metric=metric)
    assert time.perf_counter() - start < 5
