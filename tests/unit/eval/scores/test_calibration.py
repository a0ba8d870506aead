"""Confidence beside rightness: AUROC, expected calibration error, accuracy against coverage."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from lookonce.eval.scores.calibration import Calibration, accuracy_at, auroc, expected_error
from lookonce.eval.scores.prediction import Prediction


def predictions(*answered: tuple[bool, float | None]) -> list[Prediction]:
    return [Prediction("here:1", (), "q", "yes", "yes" if right else "no", "", logprob=p) for right, p in answered]


def test_auroc_counts_the_pairs_in_which_the_right_answer_is_more_confident():
    confidence, right = np.array([0.9, 0.8, 0.7, 0.6, 0.5]), np.array([1, 0, 1, 1, 0.0])
    # right: .9 beats both wrong ones; .7 and .6 beat .5 and not .8: 4 of 6 pairs
    assert auroc(confidence, right) == pytest.approx(4 / 6)
    assert auroc(np.array([0.5, 0.5, 0.1]), np.array([1, 0, 0.0])) == pytest.approx(1.5 / 2)  # a tie is half a pair
    assert auroc(confidence, np.ones(5)) is None and auroc(confidence, np.zeros(5)) is None


def test_the_expected_calibration_error_is_that_of_guo_et_al():
    probability, right = np.array([0.95, 0.97, 0.94, 0.5, 0.52]), np.array([1, 1, 0, 1, 0.0])
    # 15 bins: the first three are in (14/15, 1], the others in (7/15, 8/15]
    expected = 3 / 5 * abs(2 / 3 - (0.95 + 0.97 + 0.94) / 3) + 2 / 5 * abs(1 / 2 - (0.5 + 0.52) / 2)
    assert expected_error(probability, right) == pytest.approx(expected) == pytest.approx(0.176)
    assert expected_error(np.array([1.0, 0.0]), np.array([1, 0.0])) == 0


def test_the_most_confident_answers_are_counted_first_and_ties_share_their_rightness():
    confidence, right = np.array([0.1, 0.9, 0.8, 0.8]), np.array([0, 1, 1, 0.0])
    # 3 of 10 tenths of 4 answers are 2 (rounded up): .9, and one of the two at .8, of which half are right
    assert accuracy_at(3, confidence, right) == pytest.approx((1 + 0.5) / 2)
    assert accuracy_at(1, confidence, right) == 1 and accuracy_at(10, confidence, right) == 2 / 4


def test_a_calibrated_model_has_no_calibration_error_and_the_order_of_questions_does_not_matter():
    draw = random.Random(0)
    logprobs = [math.log(draw.choice((0.2, 0.4, 0.6, 0.8))) for _ in range(5_000)]
    answered = predictions(*((draw.random() < math.exp(one), one) for one in logprobs))
    found = Calibration.of(answered)
    assert found.ece < 0.02 and 0.65 < found.auroc < 0.75
    assert found.coverage["0.1"] > 0.75 and found.coverage["1.0"] == pytest.approx(0.5144)
    shuffled = Calibration.of(draw.sample(answered, len(answered)))
    assert shuffled.ece == pytest.approx(found.ece) and shuffled.auroc == pytest.approx(found.auroc)
    assert shuffled.coverage == pytest.approx(found.coverage)


def test_answers_without_a_finite_log_probability_are_left_out_and_counted():
    broken = [(True, math.nan), (False, -math.inf), (True, None), (False, math.inf)]
    found = Calibration.of(predictions((True, -0.1), (False, -2.0), *broken))
    assert (found.num_questions, found.num_without, found.auroc) == (2, 4, 1)
    assert "NaN" not in json.dumps(found.__dict__)


def test_there_is_no_calibration_without_log_probabilities():
    assert Calibration.of([]) is None
    assert Calibration.of(predictions((True, None), (True, math.nan))) is None


def test_a_log_probability_above_zero_by_rounding_is_certain():
    assert Calibration.of(predictions((True, 1e-6))).ece == 0
