"""95 % intervals of means over questions, by resampling images.

Q questions, C clusters (images), K columns (runs, differences, scores), R resamples.

Design: a resample draws as many clusters as there are, with replacement, and takes all their questions. All resamples
of all columns are one matrix product, in chunks of bounded memory: 10,000 resamples of 975 images take about 1 s,
nearly all of it to draw. All columns see the same resamples.

Percentiles alone make intervals that are too short where images are few, so they are taken at the quantiles of a t
distribution (Hesterberg 2015, "What teachers should know about the bootstrap", section 3.4). Those of a share are also
corrected for skewness (BCa, Efron 1987), because a share near 1 has more room below than above. A difference whose
images have both signs has room on both sides: its skewness in few images is mostly chance, and to correct for it makes
the interval too short on one side.

Simulated with correlated questions, the intervals of shares hold the truth 94 to 95 % of the time with 100 images and
91 to 94 % with 30 (percentiles alone: 92 to 94 %, and 87 % with 20); those of differences 93 to 96 % and 91 to 96 %
(with BCa's corrections: 89 to 95 % and 85 to 94 %). Of five images they hold it 86 to 96 % of the time, and of fewer
there is none.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookonce.eval.statistics.clusters import Clusters, totals

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]
RESAMPLES = 10_000
SEED = 0
MAX_CHUNK = 1 << 22
"""The largest number of drawn counts that are in memory at a time (32 MB)."""
TAIL = 0.025
MIN_CLUSTERS = 5
"""The fewest clusters with an interval: with two images, one of 95 % holds the truth at most 82 % of the time."""
FEW_CLUSTERS = 10
"""The fewest clusters with which an interval is not often too short."""
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
    """The interval of each column's mean; NaN counts as not asked. None if fewer than `MIN_CLUSTERS` have values."""
    is_known = ~np.isnan(values_QK)
    sums_CK = totals(np.where(is_known, values_QK, 0.0), clusters)
    return [
        None if np.isnan(low) else Interval(float(low), float(high))
        for low, high in ratio_intervals(sums_CK, totals(is_known.astype(np.float64), clusters)).T
    ]


def of_share(interval: Interval | None, values_Q: Vector, clusters: Clusters) -> Interval | None:
    """The interval of a share: the mean of values from 0 to 1.

    Where all answers are right, or all wrong, resamples do not differ. The interval is then that of Clopper and Pearson
    with each image as one trial. Elsewhere it is at most that of Wilson, also with each image as one trial, because
    answers about one image can do no more than all be right or all wrong; resamples of five images may go from 0 to 1.
    """
    if interval is None:
        return None
    asked_C, share = np.bincount(clusters), float(values_Q.mean())
    num_trials = float(asked_C.sum() ** 2 / (asked_C**2).sum())  # images of different sizes tell less than equal ones
    if share in (0.0, 1.0):
        return Interval(_bound(clusters), 1.0) if share else Interval(0.0, 1 - _bound(clusters))
    low, high = _wilson(share, num_trials)
    return Interval(max(low, interval.low), min(high, interval.high))


def of_difference(interval: Interval | None, clusters: Clusters) -> Interval | None:
    """The interval of a difference, also where one run is right and the other wrong everywhere: as for a share."""
    if interval == (1.0, 1.0):
        return Interval(_bound(clusters), 1.0)
    return Interval(-1.0, -_bound(clusters)) if interval == (-1.0, -1.0) else interval


def _bound(clusters: Clusters) -> float:
    """The lowest share with which as many images without an exception are not rarer than 2.5 %."""
    return float(TAIL ** (1 / (clusters.max() + 1)))


def _wilson(share: float, num_trials: float) -> tuple[float, float]:
    """The interval of a share of independent trials (Wilson 1927)."""
    square = NORMAL.inv_cdf(TAIL) ** 2 / num_trials
    middle, half = share + square / 2, (square * (share * (1 - share) + square / 4)) ** 0.5
    return (middle - half) / (1 + square), (middle + half) / (1 + square)


def ratio_intervals(numerators_CK: Matrix, denominators_CK: Matrix) -> Matrix:
    """Low and high end, [2, K], of each column's sum of numerators over its sum of denominators.

    NaN where fewer than `MIN_CLUSTERS` have a denominator.
    """
    resampled_RK = np.sort(_resample(numerators_CK, denominators_CK), axis=0)
    columns = zip(resampled_RK.T, numerators_CK.T, denominators_CK.T, strict=True)
    ends = [_ends(sorted_R[~np.isnan(sorted_R)], right_C, asked_C) for sorted_R, right_C, asked_C in columns]
    return np.array(ends).reshape(-1, 2).T


def _resample(numerators_CK: Matrix, denominators_CK: Matrix) -> Matrix:
    """The ratios of all resamples; NaN where a resample has no denominator."""
    random, num_clusters = np.random.default_rng(SEED), len(numerators_CK)
    chunk = max(MAX_CHUNK // max(num_clusters, 1), 1)
    parts = []
    for start in range(0, RESAMPLES, chunk):
        size = min(chunk, RESAMPLES - start)
        counts_RC = random.multinomial(num_clusters, np.full(num_clusters, 1 / num_clusters), size).astype(np.float64)
        with np.errstate(invalid="ignore"):
            parts.append((counts_RC @ numerators_CK) / (counts_RC @ denominators_CK))
    return np.concatenate(parts)


def _ends(sorted_R: Vector, numerators_C: Vector, denominators_C: Vector) -> tuple[float, float]:
    """The percentiles of a column's sorted resamples at the quantiles of t; those of a share corrected as BCa does."""
    num_clusters = int(np.count_nonzero(denominators_C))
    if num_clusters < MIN_CLUSTERS:
        return np.nan, np.nan
    z = -NORMAL.inv_cdf(TAIL)
    width = _t_quantile(z, num_clusters - 1) * (num_clusters / (num_clusters - 1)) ** 0.5
    bias = skew = 0.0
    if np.all(numerators_C >= 0) or np.all(numerators_C <= 0):
        bias = _bias(sorted_R, numerators_C.sum() / denominators_C.sum())
        skew = _acceleration(numerators_C, denominators_C)
    shares = [NORMAL.cdf(bias + _corrected(bias + sign * width, skew)) for sign in (-1, 1)]
    low, high = np.quantile(sorted_R, shares)
    return float(low), float(high)


def _bias(sorted_R: Vector, ratio: float) -> float:
    """BCa's correction for resamples that are more often below the ratio than above it, or less often."""
    below = (np.searchsorted(sorted_R, ratio, "left") + np.searchsorted(sorted_R, ratio, "right")) / 2
    return NORMAL.inv_cdf(float(np.clip(below / len(sorted_R), 1 / RESAMPLES, 1 - 1 / RESAMPLES)))


def _acceleration(numerators_C: Vector, denominators_C: Vector) -> float:
    """How the ratio's standard error changes with the ratio, from leaving out one cluster at a time."""
    rest_C, rest_asked_C = (sums.sum() - sums for sums in (numerators_C, denominators_C))
    ratios_C = rest_C / rest_asked_C
    from_mean_C = ratios_C.mean() - ratios_C
    squares = float((from_mean_C**2).sum())
    return float((from_mean_C**3).sum()) / (6 * squares**1.5) if squares else 0.0


def _corrected(z: float, skew: float) -> float:
    """BCa's correction for skewness; where it has no solution, the farthest percentile."""
    return z / (1 - skew * z) if skew * z < 1 else float(np.copysign(np.inf, z))


def _t_quantile(z: float, freedom: int) -> float:
    """The quantile of t from that of the normal distribution (Fisher's expansion; 1 % too short at 5 degrees)."""
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
