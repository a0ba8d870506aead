"""The few lengths of packs: all fit, and no other few would need less padding."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.train.lengths import choose_lengths, fitting, round_up

quick = settings(deadline=None, database=None, max_examples=100)
MULTIPLE = 8
FOUND = st.lists(st.integers(1, 100), min_size=1, max_size=25)
NUM = st.integers(1, 4)


def padded(found: list[int], lengths: list[int]) -> int:
    """Tokens, padding included."""
    return sum(min(length for length in lengths if length >= number) for number in found)


@quick
@given(FOUND, NUM)
def test_no_other_lengths_need_less_padding(found, num_lengths):
    longest = max(found)
    sizes = sorted({round_up(length, MULTIPLE) for length in found})
    others = [
        [*chosen, sizes[-1]]
        for number in range(num_lengths)
        for chosen in combinations(sizes[:-1], min(number, len(sizes) - 1))
    ]
    chosen = choose_lengths(found, longest, MULTIPLE, 0, num_lengths)
    assert padded(found, chosen) == min(padded(found, other) for other in others)


@quick
@given(FOUND, NUM, st.integers(100, 200))
def test_they_are_few_multiples_and_the_longest_allowed_is_one_of_them(found, num_lengths, longest):
    chosen = choose_lengths(found, longest, MULTIPLE, 10, num_lengths)
    assert chosen == sorted(set(chosen)) and len(chosen) <= num_lengths + 1
    assert all(length % MULTIPLE == 0 for length in chosen)
    assert chosen[-1] == round_up(longest, MULTIPLE) >= max(found)


def test_where_there_is_nothing_to_choose_from_the_longest_does_for_all():
    assert choose_lengths([], 100, MULTIPLE, 0) == [104]


@pytest.mark.parametrize(
    ("found", "num_lengths", "expected"),
    [
        ([10] * 50 + [60] * 50 + [90], 2, [16, 96]),
        ([10] * 50 + [60] * 500 + [90], 2, [64, 96]),
        ([10, 60, 90], 3, [16, 64, 96]),
        ([16, 16], 3, [16, 96]),
        ([90, 90], 3, [96]),
    ],
)
def test_lengths_that_occur_often_have_the_least_padding(found, num_lengths, expected):
    assert choose_lengths(found, 96, MULTIPLE, 0, num_lengths) == expected


@pytest.mark.parametrize(("length", "expected"), [(1, 16), (16, 16), (17, 64), (64, 64), (65, 96), (96, 96)])
def test_the_shortest_that_holds_a_pack_fits_it(length, expected):
    assert fitting(length, [16, 64, 96]) == expected


@pytest.mark.parametrize(("number", "expected"), [(0, 0), (1, 8), (8, 8), (9, 16)])
def test_numbers_are_rounded_up(number, expected):
    assert round_up(number, MULTIPLE) == expected


def test_a_length_that_saves_little_is_not_compiled_for():
    found = [1000] * 100 + [1100] + [8000] * 100
    saved = 8000 - 1100
    assert choose_lengths(found, 8192, 1, worth=saved) == [1000, 1100, 8000, 8192]
    assert choose_lengths(found, 8192, 1, worth=saved + 1) == [1000, 8000, 8192]
    assert choose_lengths(found, 8192, 1, worth=10**6) == [8000, 8192]
