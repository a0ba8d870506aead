"""Tests of differences: exact where a formula exists, and corrected for several pairs."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from lookonce.eval import statistics
from lookonce.eval.statistics import holm, mcnemar_p, sign_flip_p


def test_few_images_have_the_p_of_all_their_signs():
    differences = np.array([[3.0], [2.0], [2.0], [-1.0], [1.0]])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 5)).reshape(5, -1).T
    exact = np.mean(np.abs(signs @ differences) >= 7)
    assert sign_flip_p(differences)[0] == pytest.approx(exact, abs=0.015)


def test_equal_answers_have_p_1_and_memory_limits_change_nothing(monkeypatch):
    differences = np.array([[0.0, 1 / 3, 1.0]] * 40)
    expected = sign_flip_p(differences)
    assert expected[0] == 1.0 and expected[1] == expected[2] == 1 / 10_001
    monkeypatch.setattr(statistics, "MAX_CHUNK", 1234)
    assert sign_flip_p(differences).tolist() == expected.tolist()


@pytest.mark.parametrize(("one", "other"), [(0, 0), (5, 5), (0, 6), (3, 10), (10, 3), (40, 61)])
def test_mcnemar_is_the_exact_binomial(one, other):
    number = one + other
    tail = sum(comb(number, wins) for wins in range(min(one, other) + 1)) / 2**number
    assert mcnemar_p(one, other) == pytest.approx(min(1.0, 2 * tail))


def test_mcnemar_of_thousands_of_questions_does_not_overflow():
    assert mcnemar_p(4500, 4500) == 1.0 and mcnemar_p(4000, 5000) < 1e-20


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [
        ([], []),
        ([0.04], [0.04]),
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.6], [1.0, 1.0]),
    ],
)
def test_holm(p_values, expected):
    assert holm(p_values) == pytest.approx(expected)
