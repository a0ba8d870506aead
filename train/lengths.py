"""The few lengths that packs are padded to on a GPU, where each length is compiled for once.

Design: compiling takes some ten seconds a length, padding costs its share of every step. The lengths of an epoch's
packs are known beforehand, so the best few are too: those with the least padding in all, found by dynamic programming
over the lengths that occur. A length for whatever may come in another epoch, the longest allowed, is always there, and
is compiled for when it is needed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

NUM_LENGTHS = 4


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def choose_lengths(found: Sequence[int], longest: int, multiple: int, num_lengths: int = NUM_LENGTHS) -> list[int]:
    """At most `num_lengths` multiples that hold all the lengths `found` with the least padding, and `longest`."""
    counts = sorted(Counter(round_up(length, multiple) for length in found).items())
    sizes, numbers = [size for size, _ in counts], [number for _, number in counts]

    def padded(first: int, last: int) -> int:
        """Tokens if all from `first` to `last` are padded to the last."""
        return sizes[last] * sum(numbers[first : last + 1])

    best: list[tuple[float, list[int]]]
    best = [(0, []), *((math.inf, []) for _ in sizes)]  # for none of the sizes, for the first, the first two, ...
    for _ in range(min(num_lengths, len(sizes))):
        best = [best[0]] + [
            min((best[first][0] + padded(first, last), [*best[first][1], sizes[last]]) for first in range(last + 1))
            for last in range(len(sizes))
        ]
    return sorted({*best[-1][1], round_up(longest, multiple)})


def fitting(length: int, lengths: Sequence[int]) -> int:
    """The shortest of the sorted `lengths` that holds `length`."""
    return lengths[bisect_left(lengths, length)]
