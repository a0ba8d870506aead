"""The definition of which token attends to which, written from rows, is the attention of training."""

from __future__ import annotations

import random

import pytest
import torch

from lookonce.selftest.attention import Layout, Lengths, random_layout
from lookonce.train.data.packing import BLOCK
from lookonce.train.model.attention import dense_mask

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_the_definition_agrees_with_the_mask_of_training(seed):
    layout = random_layout(random.Random(seed), 500)
    assert torch.equal(layout.allowed(CPU), dense_mask(layout.seen_until(CPU))[0, 0])


def test_a_row_sees_its_prefix_and_itself():
    allowed = Layout((Lengths(2, (2, 1)), Lengths(0, (1,)))).allowed(CPU)
    assert allowed.shape == (2 * BLOCK, 2 * BLOCK)
    assert allowed[:6, :6].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_a_row_sees_what_it_shares_with_the_row_before():
    """The second branch begins with the first token of the first one, the third with two of the second."""
    allowed = Layout((Lengths(1, (2, 3, 3), (0, 1, 2)),)).allowed(CPU)
    assert allowed[:7, :7].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [1, 1, 0, 1, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


def test_a_pack_may_be_full_to_its_last_token():
    layout = Layout((Lengths(BLOCK, (BLOCK - 2, 2)),))
    assert layout.length == 2 * BLOCK and int(layout.seen_until(CPU)[-1]) == 2 * BLOCK


def test_random_layouts_have_one_image_several_or_none_and_many_lengths():
    rng = random.Random(0)
    layouts = [random_layout(rng, 2000) for _ in range(40)]
    assert all(BLOCK < layout.length <= 3328 and layout.length % BLOCK == 0 for layout in layouts)
    assert len({layout.length for layout in layouts}) > 8
    assert {len(layout.groups) > 1 for layout in layouts} == {True, False}
    assert {prefix > 0 for layout in layouts for prefix, *_ in layout.groups} == {True, False}
    assert {any(group.shared) for layout in layouts for group in layout.groups} == {True, False}
