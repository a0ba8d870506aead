"""Collating packs: every example has the tokens, positions and targets that it has alone, up to its last prediction."""

from __future__ import annotations

from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.train.data.batches import PackCollator, prefix_positions
from lookonce.train.data.packing import group_examples, nested
from lookonce.train.data.tokenize import Example
from lookonce.train.model.attention import dense_mask

START, IMAGE, END, PAD = 97, 98, 99, 0
GRIDS = {"a": (1, 4, 4), "b": (1, 2, 6)}
MERGE = 2
TOKENS_OF = {key: h * w // MERGE**2 for key, (_, h, w) in GRIDS.items()}
COLLATOR = PackCollator(IMAGE, PAD, MERGE, SimpleNamespace(grid_thw=GRIDS.__getitem__))


def example(keys: str, *turns: tuple[list[int], list[int]]) -> Example:
    """Images, then questions and answers; answers are supervised."""
    pieces = [([START, IMAGE, END], False)] * len(keys)
    pieces += [(part, number == 1) for turn in turns for number, part in enumerate(turn)]
    tokens = [token for part, _ in pieces for token in part]
    supervised = [flag for part, flag in pieces for _ in part]
    sizes = tuple(TOKENS_OF[key] for key in keys)
    return Example(np.array(tokens, np.int32), np.array(supervised), tuple(keys), sizes, "")


def pack_of(examples: list[Example], length: int | None = None, weights: list[float] | None = None):
    groups = [nested(group, examples) for group in group_examples(examples, IMAGE)]
    length = length or sum(group.num_tokens for group in groups)
    return COLLATOR(groups, examples, weights or [1.0] * len(examples), length), groups


def as_lists(batch):
    return {name: tensor.tolist() for name, tensor in batch.items()}


@pytest.mark.guarantee(
    "A pack has each token that a target is predicted from or that such a token attends to, and no other."
)
def test_a_pack_has_each_prefix_followed_by_its_branches():
    """Three questions about an image of four tokens, the last two with the same prompt; and one without an image."""
    examples = [
        example("a", ([5, 6], [7, 8])),
        example("a", ([5], [9])),
        example("a", ([5], [7])),
        example("", ([5], [9])),
    ]
    batch, groups = pack_of(examples, 20, [0.5, 0.25, 2.0, 4.0])
    assert [group.examples for group in groups] == [(1, 2, 0), (3,)]
    found = as_lists(batch)
    assert found["input_ids"] == [[START, *[IMAGE] * 4, END, 5, 9, 7, 6, 7, 5, 9, *[PAD] * 7]]
    assert found["seen_until"] == [11] * 7 + [8, 9] + [11] * 2 + [13] * 2 + [20] * 7
    assert found["logits_to_keep"] == [6, 6, 9, 10, 11]
    assert found["targets"] == [[9, 7, 7, 8, 9]]
    assert found["weights"] == [[0.5, 0.25, 2.0, 2.0, 4.0]]
    assert batch["position_ids"].shape == (3, 1, 20)
    time, height, width = batch["position_ids"][:, 0].tolist()
    assert time == [0, 1, 1, 1, 1, 3, 4, 5, 5, 5, 6, 0, 1] + [0] * 7
    assert height == [0, 1, 1, 2, 2, 3, 4, 5, 5, 5, 6, 0, 1] + [0] * 7
    assert width == [0, 1, 2, 1, 2, 3, 4, 5, 5, 5, 6, 0, 1] + [0] * 7


WORDS = st.lists(st.integers(1, 3), min_size=1, max_size=3)
EXAMPLES = st.lists(
    st.builds(
        lambda keys, turns: example(keys, *turns),
        st.sampled_from(["", "a", "b", "ab"]),
        st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=10,
)


def tokens_of(batch, groups) -> list[tuple[int, torch.Tensor]]:
    """Each example's index and the indices of its tokens in the pack: those that its last token attends to."""
    found, end, allowed = [], 0, dense_mask(batch["seen_until"])[0, 0]
    for group in groups:
        end += group.num_prefix_tokens
        for number, length, shared in zip_longest(group.examples, group.branch_tokens, group.shared_tokens):
            end += length - (shared or 0)
            found.append((number, allowed[end - 1].nonzero().flatten()))
    return found


@pytest.mark.guarantee(
    "A pack has each token that a target is predicted from or that such a token attends to, and no other."
)
@given(EXAMPLES)
def test_every_example_has_the_same_tokens_and_positions_as_alone(examples):
    batch, groups = pack_of(examples)
    for number, indices in tokens_of(batch, groups):
        alone, grids = examples[number], [GRIDS[key] for key in examples[number].image_keys]
        token_ids, supervised = alone.expanded(IMAGE)
        assert batch["input_ids"][0, indices].tolist() == token_ids[: len(indices)].tolist()
        assert not supervised[len(indices) + 1 :].any()
        expected, _ = prefix_positions(alone.token_ids, IMAGE, grids, MERGE)
        assert batch["position_ids"][:, 0, indices].tolist() == expected[:, : len(indices)].tolist()


@given(EXAMPLES)
def test_a_token_attends_to_those_of_its_example_alone_and_predicts_the_supervised_one_behind_it_once(examples):
    weights = [1.0 + number for number in range(len(examples))]
    batch, groups = pack_of(examples, weights=weights)
    columns = (batch[name].flatten().tolist() for name in ("logits_to_keep", "targets", "weights"))
    found, allowed = iter(zip(*columns, strict=True)), dense_mask(batch["seen_until"])[0, 0]
    expected = torch.zeros_like(allowed)
    for (number, indices), weight in zip(tokens_of(batch, groups), weights, strict=True):
        token_ids, supervised = examples[number].expanded(IMAGE)
        for index in np.flatnonzero(supervised):
            assert next(found) == (indices[index - 1], token_ids[index], weight)
        expected[indices[:, None], indices] = torch.ones(len(indices), len(indices), dtype=torch.bool).tril()
    assert not list(found) and torch.equal(allowed, expected)


@given(EXAMPLES, st.integers(0, 7))
def test_padding_attends_to_itself_and_has_no_targets(examples, num_padding):
    whole, groups = pack_of(examples)
    length = whole["input_ids"].shape[1]
    padded, _ = pack_of(examples, length + num_padding)
    for name in ("logits_to_keep", "targets", "weights"):
        assert torch.equal(padded[name], whole[name])
    for name in ("input_ids", "position_ids", "seen_until"):
        assert padded[name].shape[-1] == length + num_padding
        assert torch.equal(padded[name][..., :length], whole[name])
    assert (padded["input_ids"][0, length:] == PAD).all()
    assert (padded["seen_until"][length:] == length + num_padding).all()
    assert whole["seen_until"].max() <= length
