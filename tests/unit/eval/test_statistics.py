"""Clusters, intervals and tests: against known values, and in simulations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.eval import statistics
from lookonce.eval.statistics import Interval, clusters_of, difference_interval, holm, share_interval, sign_flip_p


@pytest.mark.parametrize(
    ("images", "expected"),
    [([], []), (["a", "b", "c", "bc", "ab"], [0, 0, 0, 0, 0]), (["ab", "cd", "ef", "da"], [0, 0, 1, 0])],
)
def test_connected_questions_are_one_cluster(images, expected):
    assert clusters_of(images).tolist() == expected


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=3), min_size=1, max_size=20))
def test_clusters_share_no_image_and_cannot_be_split(images):
    clusters = clusters_of(images)
    seen = {}
    for number, cluster in enumerate(clusters):
        seen.setdefault(cluster, set()).update(images[number])
    everything = [image for some in seen.values() for image in some]
    assert len(everything) == len(set(everything))
    for cluster in seen:  # what is reached from the first question is the whole cluster
        mine = [set(images[number]) for number in np.flatnonzero(clusters == cluster)]
        reached = mine[0]
        for _ in mine:
            reached = reached.union(*(one for one in mine if one & reached))
        assert reached == seen[cluster]


SIZES = [1, 9]
"""Questions an image."""


def test_where_questions_are_independent_intervals_are_wilsons_and_that_of_pairs():
    right = (np.arange(900) % 10 != 0).astype(float)
    low, high = share_interval(right, np.arange(900))
    assert (low, high) == (pytest.approx(0.8787, abs=0.0005), pytest.approx(0.9179, abs=0.0005))
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


def test_an_interval_is_shown_in_percent_and_without_a_negative_zero():
    assert Interval(0.9134, 0.935).in_percent() == "91.3 to 93.5"
    assert Interval(-0.0001, 0.0001).in_percent() == "0.0 to 0.0"


@pytest.mark.guarantee(
    "Between equal runs, a sign-flip test gives a p value of at most p in at most a share p of the cases."
)
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


@pytest.mark.parametrize(
    ("p_values", "expected"),
    [([], []), ([0.04], [0.04]), ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]), ([0.5, 0.6], [1.0, 1.0])],
)
def test_holm(p_values, expected):
    assert holm(p_values) == pytest.approx(expected)
