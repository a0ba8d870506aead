"""Pairs of tokens that attend to each other, counted by hand."""

from __future__ import annotations

import pytest

from lookonce.bench.step import num_pairs
from lookonce.train.data.packing import Group


@pytest.mark.parametrize(
    ("prefix", "branches", "pairs"),
    [
        (0, (3,), 1 + 2 + 3),
        (2, (1,), 1 + 2 + 3),
        (2, (1, 2), (1 + 2) + 3 + (3 + 4)),
        (500, (20,) * 9, 500 * 501 // 2 + 9 * (20 * 500 + 210)),
    ],
)
def test_a_token_attends_to_itself_and_to_earlier_tokens_of_its_branch_and_prefix(prefix, branches, pairs):
    assert num_pairs(Group(tuple(range(len(branches))), prefix, prefix, branches)) == pairs
