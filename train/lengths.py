"""The few lengths that packs are padded to on a GPU, where each length is compiled for once.

Design: compiling takes some ten seconds a length, padding costs its share of every step. The lengths of the packs to
come are known beforehand, so the best few are too: those with the least padding in all, found by dynamic programming
over the lengths that occur. One more must save more time in the whole training than its compilation takes, so a short
training has one or two and a long one up to eight. A length for whatever may come in a later epoch, the longest
allowed, is always there, and is compiled for when it is needed.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

MAX_LENGTHS = 8
COMPILE_TOKENS = 200_000
"""That could be trained on while one length is compiled for: 13 s at 65 microseconds a token, as an H200 takes for
Qwen3-VL-8B. Smaller models take less a token and are given a few lengths too many."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def choose_lengths(
    found: Sequence[int], longest: int, multiple: int, worth: float, max_lengths: int = MAX_LENGTHS
) -> list[int]:
    """The multiples that hold all the lengths `found` with little padding, and one that holds `longest`; sorted.

    Each further length saves at least `worth` tokens of padding in these.
    """
    counts = sorted(Counter(round_up(length, multiple) for length in found).items())
    best: list[int] = []
    num_tokens = math.inf
    for lengths, padded in _best_of_each_number(counts, max_lengths):
        if num_tokens - padded < worth:
            break
        best, num_tokens = lengths, padded
    return sorted({*best, round_up(longest, multiple)})


def _best_of_each_number(counts: Sequence[tuple[int, int]], max_lengths: int) -> Iterator[tuple[list[int], float]]:
    """With one length, with two, ...: those that make the fewest tokens of `counts` (lengths and how often), and how
    many that are."""
    sizes, numbers = [size for size, _ in counts], [number for _, number in counts]
    below = [0, *itertools.accumulate(numbers)]
    best: list[tuple[float, list[int]]]
    best = [(0, []), *((math.inf, []) for _ in sizes)]  # for none of the sizes, for the first, the first two, ...
    for _ in range(min(max_lengths, len(sizes))):
        best = [best[0]] + [
            min(
                (best[first][0] + sizes[last] * (below[last + 1] - below[first]), [*best[first][1], sizes[last]])
                for first in range(last + 1)
            )
            for last in range(len(sizes))
        ]
        yield best[-1][1], best[-1][0]


def fitting(length: int, lengths: Sequence[int]) -> int:
    """The shortest of the sorted `lengths` that holds `length`."""
    return lengths[bisect_left(lengths, length)]
