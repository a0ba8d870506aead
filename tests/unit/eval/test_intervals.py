"""Intervals: those of the textbook where there is one, and edges."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from lookonce.eval import statistics
from lookonce.eval.statistics import Interval, clusters_of, difference_interval, share_interval

SIZES = [1, 3, 9]
"""Questions an image."""


def test_where_questions_are_independent_the_interval_of_a_share_is_wilsons():
    right = (np.arange(900) % 10 != 0).astype(float)
    low, high = share_interval(right, np.arange(900))
    assert (low, high) == (pytest.approx(0.8787, abs=0.0005), pytest.approx(0.9179, abs=0.0005))


def test_where_questions_are_independent_the_interval_of_a_difference_is_that_of_pairs():
    difference = np.resize([1.0, 0, 0, 0, 0, -1, 0, 0, 0, 1], 1000)  # standard error 0.0171
    low, high = difference_interval(difference, np.arange(1000))
    assert (low, high) == (pytest.approx(0.1 - 0.0336, abs=0.0005), pytest.approx(0.1 + 0.0336, abs=0.0005))


@pytest.mark.parametrize("interval", [share_interval, difference_interval])
def test_of_fewer_than_five_images_there_is_no_interval(interval):
    answers = np.tile([1.0, 0.0, 1.0], 4)
    assert interval(answers, np.arange(12) // 3) is None
    assert interval(answers[:3], clusters_of(["a", "a", "ab"])) is None
    assert interval(np.tile(answers, 2), np.arange(24) // 4) is not None


@pytest.mark.parametrize("size", SIZES)
def test_perfect_answers_of_few_images_are_no_certainty(size):
    """About the exact interval for as many images as trials, which are all right (Clopper and Pearson)."""
    clusters, exact = np.arange(20 * size) // size, 0.025 ** (1 / 20)
    low, high = share_interval(np.ones(20 * size), clusters)
    assert (low, high) == (pytest.approx(exact, abs=0.03), 1.0)
    assert share_interval(np.zeros(20 * size), clusters) == (0.0, pytest.approx(1 - low))


@pytest.mark.parametrize("size", SIZES)
def test_runs_that_differ_nowhere_or_everywhere_are_no_certainty(size):
    clusters = np.arange(20 * size) // size
    low, high = difference_interval(np.zeros(20 * size), clusters)
    assert low == pytest.approx(-high) and 0.02 < high < 0.15
    low, high = difference_interval(np.ones(20 * size), clusters)
    assert (low, high) == (pytest.approx(2 * 0.025 ** (1 / 20) - 1, abs=0.06), 1.0)
    assert difference_interval(-np.ones(20 * size), clusters) == (-1.0, pytest.approx(-low))


def test_images_of_which_one_has_most_questions_tell_less_than_equal_ones():
    answers = np.resize([1.0, 0.0, 1.0, 1.0], 60)
    equal, unequal = np.arange(60) // 6, np.maximum(np.arange(60) - 50, 0)
    for interval in (share_interval, difference_interval):
        (low, high), (lowest, highest) = interval(answers, equal), interval(answers, unequal)
        assert highest - lowest > 1.5 * (high - low)


def test_the_order_of_questions_and_the_names_of_images_count_nothing():
    rng = np.random.default_rng(0)
    values, clusters = rng.random(60), np.arange(60) // 2
    order = rng.permutation(60)
    for interval in (share_interval, difference_interval):
        assert interval(values[order], 7 * clusters[order]) == pytest.approx(interval(values, clusters))


def test_quantiles_of_t_are_those_of_the_tables():
    z = NormalDist().inv_cdf(0.975)
    found = statistics._t_quantiles(z, np.array([9.0, 29, 99]))
    assert found == pytest.approx([2.262, 2.045, 1.984], abs=0.005)


def test_an_interval_is_shown_in_percent_and_without_a_negative_zero():
    assert Interval(0.9134, 0.935).in_percent() == "91.3 to 93.5"
    assert Interval(-0.0001, 0.0001).in_percent() == "0.0 to 0.0"
