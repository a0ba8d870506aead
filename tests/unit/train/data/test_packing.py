"""Packing: every example once, no pack too long, ranks balanced."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.groups import groups_of

from lookonce.train.data.packing import Group, Pack, _distribute, pack_step, row_batches

LIMIT = 100
LENGTHS = st.tuples(st.integers(0, 60), st.lists(st.integers(1, 40), min_size=1, max_size=8))
STEPS = st.lists(LENGTHS, min_size=1, max_size=10).map(groups_of)
RANKS = st.integers(1, 5)


def packs_of(ranks: list[list[Pack]]) -> list[Pack]:
    return [pack for packs in ranks for pack in packs]


@given(STEPS, RANKS)
def test_every_example_is_in_one_pack_of_equally_many_that_fit_and_are_at_least_half_full(step, num_ranks):
    ranks = pack_step(step, LIMIT, num_ranks)
    own = [pack for pack in packs_of(ranks) if not pack.is_filler]
    whole = {number: group for group in step for number in group.examples}
    parts = [part for pack in own for part in pack.groups]
    assert Counter(number for part in parts for number in part.examples) == Counter(list(whole))
    for part in parts:
        [group] = {whole[number] for number in part.examples}
        assert part == group.subset([group.examples.index(number) for number in part.examples])
    assert all(0 < pack.num_tokens <= LIMIT for pack in packs_of(ranks))
    [num_packs] = {len(packs) for packs in ranks}
    assert len(ranks) == num_ranks and num_packs >= 1
    for packs in ranks:
        tokens = [pack.num_tokens for pack in packs]
        assert tokens == sorted(tokens, reverse=True)
    assert num_packs * num_ranks <= 2 * sum(pack.num_tokens for pack in own) / LIMIT + num_ranks


@given(STEPS, RANKS)
def test_a_filler_repeats_the_smallest_pack_only_if_nothing_can_be_split(step, num_ranks):
    packs = packs_of(pack_step(step, LIMIT, num_ranks))
    fillers, own = ([pack for pack in packs if pack.is_filler == is_filler] for is_filler in (True, False))
    assert len(fillers) < num_ranks
    for filler in fillers:
        assert replace(filler, is_filler=False) in own
        assert filler.num_tokens == min(pack.num_tokens for pack in own)
        assert all(pack.num_samples == 1 for pack in own)


@given(STEPS)
def test_one_rank_needs_no_filler_and_splits_only_groups_longer_than_a_pack(step):
    [packs] = pack_step(step, LIMIT)
    assert not any(pack.is_filler for pack in packs)
    parts = Counter(part.len_prefix for pack in packs for part in pack.groups)
    for group in step:
        assert (parts[group.len_prefix] > 1) == (group.num_tokens > LIMIT)


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "expected"),
    [
        ([(0, [30]), (0, [50]), (0, [20]), (0, [40])], 1, [[[50, 20], [30, 40]]]),
        ([(40, [20, 20, 20, 20])], 1, [[[80], [80]]]),
        ([(40, [30, 30, 30])], 1, [[[100], [70]]]),
        ([(0, [60]), (0, [70]), (0, [80])], 2, [[[80], [60]], [[70], [60]]]),
        ([(10, [5, 5, 5, 5])], 2, [[[20]], [[20]]]),
        ([(10, [5, 5, 5]), (0, [30])], 4, [[[30]], [[15]], [[15]], [[15]]]),
    ],
    ids=[
        "packs of equal length",
        "longer than a pack",
        "split as evenly as possible",
        "a filler",
        "split for an idle rank",
        "the group with the most branches is split",
    ],
)
def test_packs_in_typical_cases(lengths, num_ranks, expected):
    ranks = pack_step(groups_of(lengths), LIMIT, num_ranks)
    assert [[[part.num_tokens for part in pack.groups] for pack in packs] for packs in ranks] == expected


def test_groups_are_exchanged_until_packs_are_alike():
    groups = groups_of([(0, [length]) for length in (3000, 3000, 2000, 2000, 2000)])  # longest first: 7000, 5000
    ranks = pack_step(groups, 8000, 2)
    assert [[[part.num_tokens for part in pack.groups] for pack in packs] for packs in ranks] == [
        [[2000, 2000, 2000]],
        [[3000, 3000]],
    ]


@given(st.lists(st.integers(300, 2000), min_size=6, max_size=40), st.integers(2, 8))
def test_exchanging_loses_nothing_and_makes_the_longest_pack_no_longer(sizes, num_bins):
    before, bins = (_distribute(sizes, num_bins, len(sizes), exchanges) for exchanges in (False, True))
    assert sorted(index for indices in bins for index in indices) == [*range(len(sizes))]
    assert _most(bins, sizes) <= _most(before, sizes)
    for indices in bins:
        assert [sizes[index] for index in indices] == sorted((sizes[index] for index in indices), reverse=True)


@given(st.lists(st.integers(300, 8000), min_size=2, max_size=40), st.integers(2, 8))
@example([6193, 5698, 7649, 1042, 3145, 7529], 2)
def test_ranks_have_equally_many_packs_of_long_groups_too(lengths, num_ranks):
    ranks = pack_step(groups_of([(0, [length]) for length in lengths]), 8192, num_ranks)
    assert len({len(packs) for packs in ranks}) == 1
    own = [pack for packs in ranks for pack in packs if not pack.is_filler]
    assert sorted(part.num_tokens for pack in own for part in pack.groups) == sorted(lengths)
    assert all(pack.num_tokens <= 8192 for pack in own)


@pytest.mark.parametrize(("largest", "num"), [(2000, 30), (4000, 20)])
def test_exchanged_bins_are_much_more_alike(largest, num):
    left = {False: 0, True: 0}
    for seed in range(20):
        sizes = np.random.default_rng(seed).integers(300, largest, num).tolist()
        for exchanges in left:
            filled = [sum(sizes[index] for index in indices) for indices in _distribute(sizes, 4, num, exchanges)]
            left[exchanges] += max(filled) - min(filled)
    assert left[True] < 0.4 * left[False]


def test_many_groups_are_packed_as_fast_as_before():
    groups = groups_of([(0, [40])] * 13_101)
    began = time.perf_counter()
    pack_step(groups, 262_144, 2)
    assert time.perf_counter() - began < 2


def _most(bins: list[list[int]], sizes: list[int]) -> int:
    return max(sum(sizes[index] for index in indices) for indices in bins)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_example_longer_than_a_pack_is_refused_with_both_numbers(num_ranks):
    step = groups_of([(10, [5]), (80, [5, 21, 6])])
    with pytest.raises(ValueError, match="^an example of 101 tokens does not fit into a pack of 100 tokens$"):
        pack_step(step, LIMIT, num_ranks)


NUM_ROWS, ROWS = st.integers(1, 20), st.integers(1, 6)


def rows_of(num_rows: int) -> list[Group]:
    return groups_of([(10, [number + 1]) for number in range(num_rows)])


@given(NUM_ROWS, ROWS, RANKS)
def test_every_row_is_in_one_of_even_batches_and_fillers_are_for_batches_of_one(num_rows, at_most, num_ranks):
    rows = rows_of(num_rows)
    packs = packs_of(row_batches(rows, at_most, num_ranks))
    found = [row for pack in packs if not pack.is_filler for row in pack.groups]
    sizes = [pack.num_samples for pack in packs]
    assert sorted(found, key=rows.index) == rows and 1 <= min(sizes) <= max(sizes) <= at_most
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == 1 or not any(pack.is_filler for pack in packs)
