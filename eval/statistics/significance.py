"""Whether two runs differ: sign flips by image, McNemar's test, and Holm's correction for several pairs.

C clusters (images), K columns (pairs), R permutations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PERMUTATIONS = 10_000
MAX_CHUNK = 1 << 22
"""The largest number of drawn signs that are in memory at a time."""
ROUNDING = 1e-9
"""Sums that differ by less are equal: means over seeds are not exact in binary."""


def sign_flip_p(differences_CK: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """The two-sided p of each column: how often its sum is as far from 0 if each image's difference has a random sign.

    If neither run were better, what one of them answers about an image might as well be what the other one answers. So
    all questions of an image change sides together, however correlated they are. The smallest p is 1 in 10,001.
    """
    random, num_clusters = np.random.default_rng(seed), len(differences_CK)
    observed_K = np.abs(differences_CK.sum(axis=0))
    chunk = max(MAX_CHUNK // max(num_clusters, 1), 1)
    as_far_K = np.zeros(differences_CK.shape[1])
    for start in range(0, PERMUTATIONS, chunk):
        size = (min(chunk, PERMUTATIONS - start), num_clusters)
        signs_RC = random.integers(0, 2, size, dtype=np.int8) * 2.0 - 1
        as_far_K += np.sum(np.abs(signs_RC @ differences_CK) >= observed_K - ROUNDING, axis=0)
    p_K: NDArray[np.float64] = (1 + as_far_K) / (1 + PERMUTATIONS)
    return p_K


def mcnemar_p(only_one: int, only_other: int) -> float:
    """McNemar's exact two-sided p for questions that only one of two runs answers right; as if they were independent.

    Questions of one image are not: the p is too small where they are right or wrong together.
    """
    number = only_one + only_other
    tail, ways = 0, 1  # numbers of outcomes, exact
    for wins in range(min(only_one, only_other) + 1):
        tail += ways
        ways = ways * (number - wins) // (wins + 1)
    return min(1.0, 2 * tail / (1 << number))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values corrected for their number (Holm 1979), in the given order."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=lambda number: p_values[number])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = largest
    return adjusted
