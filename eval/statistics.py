"""How sure a score is, and whether two scores differ; numbers only.

Q questions, C clusters (images), K columns (several scores, or pairs of runs), R permutations.

Answers about one image are right or wrong together, so intervals and tests draw images, not questions. Questions that
share an image, directly or through others, are one cluster. With the first image alone as its cluster, a question would
be correlated with others of another cluster, and intervals would be too short. The price is that an image in every
question makes all of them one cluster, and there is no interval. A question without an image belongs to its record.

An interval is a closed formula, so the same answers have the same one, within microseconds. The variance of a mean is
that between images, linearised as in surveys. The interval is Wilson's (1927) for as many independent trials as have
this variance, as Korn and Graubard (1998) take them for Clopper and Pearson's; the quantile is that of t, for as many
images of one size as would tell as much. A difference d is the share (1 + d) / 2.

The wrong answers of a good model are in few images, which may by chance show too little variance, or none. So the
variance has two more images, with the lowest and the highest value, of mean size but with the weight of one question,
or of a quarter for a difference (in the way of Agresti and Min 2005). The more images, the less this counts.

docs/compare.md has a simulation of how often intervals hold the truth, and LOG.md other methods, such as resampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookonce.datasets.curriculum import connected
from lookonce.text import in_percent

Clusters = NDArray[np.intp]
"""The number of each question's cluster, from 0."""
Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]
MIN_CLUSTERS = 5
"""The fewest clusters with an interval."""
Z = -NormalDist().inv_cdf(0.025)
PERMUTATIONS = 10_000
MAX_CHUNK = 1 << 22
"""The largest number of drawn signs that are in memory at a time."""
ROUNDING = 1e-9
"""Sums that differ by less are equal: means over seeds are not exact in binary."""


def clusters_of(images: Sequence[Sequence[Any]]) -> Clusters:
    """The cluster of each question, from what it shares with others: its images, at least one value each."""
    root_of = connected(images)
    numbers: dict[Any, int] = {}
    cluster_of = [numbers.setdefault(root_of[shared[0]], len(numbers)) for shared in images]
    return np.array(cluster_of, dtype=np.intp)


def totals(values_QK: Matrix, clusters: Clusters) -> Matrix:
    """The sum of each column in each cluster."""
    sums_CK = np.zeros((clusters.max(initial=-1) + 1, values_QK.shape[1]))
    np.add.at(sums_CK, clusters, values_QK)
    return sums_CK


class Interval(NamedTuple):
    """The two ends of a 95 % interval."""

    low: float
    high: float

    def in_percent(self) -> str:
        """Both ends in percent: "91.3 to 93.5"."""
        return in_percent(self)


def share_interval(values_Q: Vector, clusters: Clusters) -> Interval | None:
    """The interval of the mean of values from 0 to 1; None for fewer than `MIN_CLUSTERS`."""
    return _interval(share_ends, values_Q, clusters)


def difference_interval(values_Q: Vector, clusters: Clusters) -> Interval | None:
    """The interval of the mean of values from -1 to 1, the differences in pairs; None for fewer than `MIN_CLUSTERS`."""
    return _interval(difference_ends, values_Q, clusters)


def _interval(ends: Callable[[Matrix, Matrix], Matrix], values_Q: Vector, clusters: Clusters) -> Interval | None:
    numbers_Q = np.unique(clusters, return_inverse=True)[1]
    sums_C2 = totals(np.stack([values_Q, np.ones(len(values_Q))], axis=1), numbers_Q)
    if len(sums_C2) < MIN_CLUSTERS:
        return None
    [[low], [high]] = ends(sums_C2[:, :1], sums_C2[:, 1:]).tolist()
    return Interval(low, high)


def share_ends(sums_CK: Matrix, asked_CK: Matrix, weight: float = 1.0) -> Matrix:
    """Low and high end, [2, K], of sums of values from 0 to 1 over numbers of questions.

    Each of the two more images, with the values 0 and 1, counts as `weight` questions.
    """
    num_asked_K, size_K = asked_CK.sum(axis=0), asked_CK.mean(axis=0)
    share_K = sums_CK.sum(axis=0) / num_asked_K
    total_K = num_asked_K + 2 * weight
    mean_K = (share_K * num_asked_K + weight) / total_K
    squares_K = ((sums_CK - mean_K * asked_CK) ** 2).sum(axis=0)
    squares_K += weight * size_K * (mean_K**2 + (1 - mean_K) ** 2)
    freedom_K = np.maximum(num_asked_K**2 / (asked_CK**2).sum(axis=0) - 1, 1.0)  # of images of one size
    half_K = _t_quantiles(Z, freedom_K) * np.sqrt(squares_K * (1 + 1 / freedom_K)) / total_K
    square_K = half_K**2 / (mean_K * (1 - mean_K))  # of z, by the number of trials
    middle_K, half_K = share_K + square_K / 2, np.sqrt(square_K * (share_K * (1 - share_K) + square_K / 4))
    low_K, high_K = (middle_K - half_K) / (1 + square_K), (middle_K + half_K) / (1 + square_K)
    return np.stack([np.clip(low_K, 0.0, share_K), np.clip(high_K, share_K, 1.0)])  # rounding could pass these


def difference_ends(sums_CK: Matrix, asked_CK: Matrix) -> Matrix:
    """Low and high end, [2, K], of sums of values from -1 to 1 over numbers of questions."""
    return 2 * share_ends((sums_CK + asked_CK) / 2, asked_CK, weight=0.25) - 1


def _t_quantiles(z: float, freedom_K: Vector) -> Vector:
    """The quantiles of t from that of the normal distribution (Fisher's expansion; 1 % too short at 5 degrees)."""
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom_K + second / freedom_K**2


def sign_flip_p(differences_CK: Matrix) -> Vector:
    """The two-sided p of each column: how often its sum is as far from 0 if each image's difference has a random sign.

    If neither run were better, what one of them answers about an image might as well be what the other one answers. So
    all questions of an image change sides together, however correlated they are. The smallest p is 1 in 10,001.
    """
    random, num_clusters = np.random.default_rng(0), len(differences_CK)
    observed_K = np.abs(differences_CK.sum(axis=0))
    chunk = max(MAX_CHUNK // max(num_clusters, 1), 1)
    as_far_K = np.zeros(differences_CK.shape[1])
    for start in range(0, PERMUTATIONS, chunk):
        size = (min(chunk, PERMUTATIONS - start), num_clusters)
        signs_RC = random.integers(0, 2, size, dtype=np.int8) * 2.0 - 1
        as_far_K += np.sum(np.abs(signs_RC @ differences_CK) >= observed_K - ROUNDING, axis=0)
    p_K: Vector = (1 + as_far_K) / (1 + PERMUTATIONS)
    return p_K


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values corrected for their number (Holm 1979), in the given order."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = largest
    return adjusted
