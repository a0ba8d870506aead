"""Each branch has a row of its own, and its block of rows reads all the blocks of keys that it attends to."""

from __future__ import annotations

import numpy as np
import pytest

from lookonce.eval.decoding.passes import Rows
from lookonce.eval.decoding.waves import PackLayout, WaveLayout
from lookonce.train.data.packing import BLOCK, Group, Pack

NEW_TOKENS, ROWS = 7, 16


def group(first: int, num_prefix_tokens: int, *branch_tokens: int) -> Group:
    examples = tuple(range(first, first + len(branch_tokens)))
    return Group(examples, num_prefix_tokens, num_prefix_tokens, branch_tokens)


PACKS = (
    Pack((group(0, 500, *[3] * 24), group(24, 0, 9))),
    Pack((group(25, 130, 1, 300), group(27, 1, *[20] * ROWS))),
)
"""One image has more questions than a block has rows; one question has no image."""


@pytest.fixture
def layout() -> WaveLayout:
    room_behind = [NEW_TOKENS] * 99
    first = PackLayout.of(PACKS[0], 0, 0, room_behind)
    return WaveLayout([], [*PACKS], [first, PackLayout.of(PACKS[1], len(first.segments), 27, room_behind)])


def test_branches_have_rows_of_their_own_in_blocks_of_one_image(layout):
    rows, prefix = Rows.of(layout.spans, ROWS), layout.column("prefix")
    assert len(set(rows.of_token)) == len(prefix) and len(rows.first) == len(rows.end) == 5
    for block in range(5):
        assert len(set(prefix[rows.of_token // ROWS == block])) == 1


def test_a_block_of_rows_reads_all_keys_that_its_branches_attend_to_and_few_others(layout):
    rows = Rows.of(layout.spans, ROWS)
    segments, branch, prefix = (layout.column(name) for name in ("segments", "branch", "prefix"))
    for number, row in enumerate(rows.of_token):
        blocks = np.flatnonzero((segments == branch[number]) | (segments == prefix[number])) // BLOCK
        assert rows.first[row // ROWS] == blocks.min() and blocks.max() < rows.end[row // ROWS]
    assert rows.end.max() * BLOCK < len(segments) + BLOCK
    assert (rows.end - rows.first).sum() < 2.2 * len(segments) / BLOCK
