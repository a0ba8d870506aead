"""95 % intervals of means over questions, by resampling images.

Q questions, C clusters (images), K columns (runs, differences, scores), R resamples.

Design: a resample draws as many clusters as there are, with replacement, and takes all their questions. All resamples
of all columns are one matrix product, in chunks of bounded memory: 10,000 resamples of 975 images take about 1 s,
nearly all of it to draw. All columns see the same resamples.

Percentiles alone make intervals that are too short where scores are near 1 and images are few: simulated with
correlated questions, 92 % right and 100 images, they hold the truth 92 to 94 % of the time, with 20 images 87 %. So the
percentiles are those of BCa (Efron 1987), which corrects for skewness, taken at the quantiles of a t distribution
(Hesterberg 2015, "What teachers should know about the bootstrap", section 3.4): 94 to 95 % and 92 %.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookonce.eval.statistics.clusters import Clusters, totals

Matrix = NDArray[np.float64]
RESAMPLES = 10_000
MAX_CHUNK = 1 << 22
"""The largest number of drawn counts that are in memory at a time (32 MB)."""
TAIL = 0.025
NORMAL = NormalDist()


class Interval(NamedTuple):
    """The two ends of a 95 % interval."""

    low: float
    high: float

    def in_percent(self) -> str:
        """Both ends in percent: "91.3 to 93.5"."""
        low, high = (round(100 * end, 1) + 0.0 for end in self)  # no "-0.0"
        return f"{low:.1f} to {high:.1f}"


def mean_intervals(values_QK: Matrix, clusters: Clusters) -> list[Interval | None]:
    """The interval of each column's mean; NaN counts as not asked. None if fewer than two clusters have values."""
    is_known = ~np.isnan(values_QK)
    sums_CK = totals(np.where(is_known, values_QK, 0.0), clusters)
    return [
        None if np.isnan(low) else Interval(float(low), float(high))
        for low, high in ratio_intervals(sums_CK, totals(is_known.astype(np.float64), clusters)).T
    ]


def wider_at_an_end(interval: Interval | None, clusters: Clusters) -> Interval | None:
    """The interval of a share, also where all answers are right, or all wrong, and resamples therefore do not differ.

    It is then that of Clopper and Pearson with each image as one trial: with a share beyond its bound, this many images
    without an exception would be rarer than 2.5 %.
    """
    bound = TAIL ** (1 / (clusters.max(initial=0) + 1))
    if interval == (1.0, 1.0):
        return Interval(bound, 1.0)
    return Interval(0.0, 1 - bound) if interval == (0.0, 0.0) else interval


def ratio_intervals(numerators_CK: Matrix, denominators_CK: Matrix, seed: int = 0) -> Matrix:
    """Low and high end, [2, K], of each column's sum of numerators over its sum of denominators.

    NaN where fewer than two clusters have a denominator.
    """
    resampled_RK = np.sort(_resample(numerators_CK, denominators_CK, seed), axis=0)
    with np.errstate(invalid="ignore"):
        ratios_K = numerators_CK.sum(axis=0) / denominators_CK.sum(axis=0)
    columns = zip(resampled_RK.T, ratios_K, _acceleration(numerators_CK, denominators_CK), strict=True)
    num_clusters_K = np.count_nonzero(denominators_CK, axis=0)
    ends = [
        _ends(sorted_R[~np.isnan(sorted_R)], ratio, skew, number) if number > 1 else (np.nan, np.nan)
        for (sorted_R, ratio, skew), number in zip(columns, num_clusters_K, strict=True)
    ]
    return np.array(ends).reshape(-1, 2).T


def _resample(numerators_CK: Matrix, denominators_CK: Matrix, seed: int) -> Matrix:
    """The ratios of all resamples; NaN where a resample has no denominator."""
    random, num_clusters = np.random.default_rng(seed), len(numerators_CK)
    chunk = max(MAX_CHUNK // max(num_clusters, 1), 1)
    parts = []
    for start in range(0, RESAMPLES, chunk):
        size = min(chunk, RESAMPLES - start)
        counts_RC = random.multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), size).astype(np.float64)
        with np.errstate(invalid="ignore"):
            parts.append((counts_RC @ numerators_CK) / (counts_RC @ denominators_CK))
    return np.concatenate(parts)


def _acceleration(numerators_CK: Matrix, denominators_CK: Matrix) -> NDArray[np.float64]:
    """How the ratio's standard error changes with the ratio, from leaving out one cluster at a time."""
    rest_CK, rest_asked_CK = (sums.sum(axis=0) - sums for sums in (numerators_CK, denominators_CK))
    is_asked = rest_asked_CK > 0
    ratios_CK = np.divide(rest_CK, rest_asked_CK, where=is_asked, out=np.zeros_like(rest_CK))
    from_mean_CK = np.where(is_asked, ratios_CK.sum(axis=0) / np.maximum(is_asked.sum(axis=0), 1) - ratios_CK, 0.0)
    cubes_K, squares_K = (from_mean_CK**3).sum(axis=0), (from_mean_CK**2).sum(axis=0)
    skew_K: NDArray[np.float64] = np.zeros_like(cubes_K)
    np.divide(cubes_K, 6 * squares_K**1.5, where=squares_K > 0, out=skew_K)
    return skew_K


def _ends(sorted_R: NDArray[np.float64], ratio: float, skew: float, num_clusters: int) -> tuple[float, float]:
    """The percentiles of sorted resamples that BCa chooses, at the quantiles of t."""
    below = (np.searchsorted(sorted_R, ratio, "left") + np.searchsorted(sorted_R, ratio, "right")) / 2
    bias = NORMAL.inv_cdf(float(np.clip(below / len(sorted_R), 1 / RESAMPLES, 1 - 1 / RESAMPLES)))
    z = -NORMAL.inv_cdf(TAIL)
    width = _t_quantile(z, num_clusters - 1) * (num_clusters / (num_clusters - 1)) ** 0.5
    shares = [NORMAL.cdf(bias + _corrected(bias + sign * width, skew)) for sign in (-1, 1)]
    low, high = np.quantile(sorted_R, shares)
    return float(low), float(high)


def _corrected(z: float, skew: float) -> float:
    """BCa's correction for skewness; where it has no solution, the farthest percentile."""
    return z / (1 - skew * z) if skew * z < 1 else float(np.copysign(np.inf, z))


def _t_quantile(z: float, freedom: int) -> float:
    """The quantile of t from that of the normal distribution (Fisher's expansion; 1 % too short at 5 degrees)."""
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
