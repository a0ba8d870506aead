"""Intervals: those of the textbook where there is one, and edges and gaps."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from lookonce.eval.statistics import bootstrap
from lookonce.eval.statistics.bootstrap import Interval, mean_intervals, of_difference, of_share
from lookonce.eval.statistics.clusters import clusters_of


def share_interval(right: list[bool], clusters: np.ndarray) -> Interval | None:
    """The interval of the share of right answers."""
    right_Q = np.array(right, dtype=float)
    [interval] = mean_intervals(right_Q[:, None], clusters)
    return of_share(interval, right_Q, clusters)


def test_where_questions_are_independent_the_interval_is_the_textbooks():
    right = np.arange(900) % 10 != 0
    low, high = share_interval(right.tolist(), np.arange(900))
    half = 1.96 * np.sqrt(0.9 * 0.1 / 900)
    assert (low, high) == (pytest.approx(0.9 - half, abs=0.002), pytest.approx(0.9 + half, abs=0.002))


def test_the_same_answers_have_the_same_interval_and_a_memory_limit_changes_nothing(monkeypatch):
    right, clusters = (np.arange(300) % 7 > 0).tolist(), np.arange(300) // 3
    expected = share_interval(right, clusters)
    monkeypatch.setattr(bootstrap, "MAX_CHUNK", 12_345)
    assert share_interval(right, clusters) == expected


def test_one_image_has_no_interval():
    assert share_interval([True, False, True], clusters_of(["a", "a", "ab"])) is None


@pytest.mark.parametrize("right", [True, False])
def test_perfect_answers_of_few_images_are_no_certainty(right):
    low, high = share_interval([right] * 20, np.arange(20) // 2)
    exact = 0.025**0.1
    assert (low, high) == ((exact, 1.0) if right else (0.0, pytest.approx(1 - exact)))


def test_the_interval_of_a_share_is_at_most_that_of_images_that_are_all_right_or_all_wrong():
    wilson = (pytest.approx(0.3755, abs=1e-4), pytest.approx(0.9638, abs=1e-4))  # of 4 right trials of 5
    assert share_interval([True] * 4 + [False], np.arange(5)) == wilson
    assert share_interval([True] * 12 + [False] * 3, np.arange(15) // 3) == wilson
    half_right = share_interval([True, True, False, True, False] * 8, np.arange(40) // 5)
    assert half_right == (0.6, 0.6)  # all images alike, so the resamples do not differ


def test_a_run_that_is_better_on_all_of_few_images_is_no_certainty():
    clusters, exact = np.arange(40) // 2, 0.025**0.05
    found = [of_difference(Interval(end, end), clusters) for end in (1.0, -1.0, 0.0)]
    assert found == [(exact, 1.0), (-1.0, -exact), (0.0, 0.0)]


def test_nan_counts_as_not_asked():
    rng = np.random.default_rng(0)
    values, clusters = rng.random((60, 1)), np.arange(60) // 2
    with_gaps = np.concatenate([values, values, np.full((60, 1), np.nan)], axis=1)
    with_gaps[40:, 1] = np.nan
    whole, part, nothing = mean_intervals(with_gaps, clusters)
    assert whole == pytest.approx(mean_intervals(values, clusters)[0])
    assert part.low < values[:40].mean() < part.high and part.high - part.low > whole.high - whole.low
    assert nothing is None


def test_values_of_one_cluster_only_have_no_interval():
    values = np.array([[1.0], [0.0], [np.nan]])
    assert mean_intervals(values, clusters_of(["a", "a", "b"])) == [None]


def test_quantiles_of_t_are_those_of_the_tables():
    z = NormalDist().inv_cdf(0.975)
    for freedom, expected in ((9, 2.262), (29, 2.045), (99, 1.984)):
        assert bootstrap._t_quantile(z, freedom) == pytest.approx(expected, abs=0.005)


def test_an_interval_is_shown_in_percent_and_without_a_negative_zero():
    assert Interval(0.9134, 0.935).in_percent() == "91.3 to 93.5"
    assert Interval(-0.0001, 0.0001).in_percent() == "0.0 to 0.0"
