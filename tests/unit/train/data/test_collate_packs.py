"""Packs to tensors: every example finds in its pack the tokens, positions and targets that it has alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.train.data.collate_packs import PackCollator
from lookonce.train.data.groups import group_examples
from lookonce.train.data.mrope import prefix_positions
from lookonce.train.data.tokenize import Example

quick = settings(deadline=None, database=None, max_examples=60)
START, IMAGE, END, PAD = 97, 98, 99, 0
GRIDS = {"a": (1, 4, 4), "b": (1, 2, 6)}
MERGE = 2
TOKENS_OF = {key: h * w // MERGE**2 for key, (_, h, w) in GRIDS.items()}
COLLATOR = PackCollator(IMAGE, PAD, MERGE, GRIDS.__getitem__)


def example(keys: str, *turns: tuple[list[int], list[int]]) -> Example:
    """Images, then questions and answers; answers are supervised."""
    pieces = [([START, IMAGE, END], False)] * len(keys)
    pieces += [(part, number == 1) for turn in turns for number, part in enumerate(turn)]
    tokens = [token for part, _ in pieces for token in part]
    supervised = [flag for part, flag in pieces for _ in part]
    sizes = tuple(TOKENS_OF[key] for key in keys)
    return Example(np.array(tokens, np.int32), np.array(supervised), tuple(keys), sizes, "")


def pack_of(examples: list[Example], length: int | None = None, weights: list[float] | None = None):
    groups = group_examples(examples, IMAGE)
    length = length or sum(group.num_tokens for group in groups)
    return COLLATOR(groups, examples, weights or [1.0] * len(examples), length), groups


def as_lists(batch):
    return {name: tensor.tolist() for name, tensor in batch.items()}


def test_a_pack_is_its_prefixes_each_with_its_branches_behind_it():
    """Three questions about an image of four tokens, the last two with one prompt, and a text."""
    examples = [
        example("a", ([5, 6], [7, 8])),
        example("a", ([5], [9])),
        example("a", ([5], [7])),
        example("", ([5], [9])),
    ]
    batch, groups = pack_of(examples, 20, [0.5, 0.25, 2.0, 4.0])
    assert [group.examples for group in groups] == [(0, 1, 2), (3,)]
    found = as_lists(batch)
    assert found["input_ids"] == [[START, *[IMAGE] * 4, END, 5, 6, 7, 8, 9, 7, 5, 9, *[PAD] * 6]]
    assert found["run"] == [0] * 7 + [1] * 3 + [2] + [3] + [5] * 2 + [6] * 6
    assert found["prefix"] == [0] * 7 + [0] * 3 + [0] + [0] + [4] * 2 + [6] * 6
    assert found["logits_to_keep"] == [7, 8, 6, 6, 12]
    assert found["targets"] == [[7, 8, 9, 7, 9]]
    assert found["weights"] == [[0.5, 0.5, 0.25, 2.0, 4.0]]
    assert batch["position_ids"].shape == (3, 1, 20)
    time, height, width = batch["position_ids"][:, 0].tolist()
    assert time == [0, 1, 1, 1, 1, 3, 4, 5, 6, 7, 5, 5, 0, 1] + [0] * 6
    assert height == [0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 5, 5, 0, 1] + [0] * 6
    assert width == [0, 1, 2, 1, 2, 3, 4, 5, 6, 7, 5, 5, 0, 1] + [0] * 6


def test_the_last_token_of_a_prefix_is_asked_for_every_branch_that_begins_with_an_answer():
    batch, _ = pack_of([example("a", ([5], [answer])) for answer in (7, 8, 7)])
    assert as_lists(batch)["logits_to_keep"] == [6, 6, 6] and as_lists(batch)["targets"] == [[7, 8, 7]]


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


def places_of(batch, groups) -> list[tuple[int, torch.Tensor]]:
    """Each example's number and where its tokens are: a prefix is followed by as many runs as it has branches."""
    found, run = [], 0
    for group in groups:
        prefix = batch["run"] == run
        for number in group.examples:
            run += 1
            found.append((number, (prefix | (batch["run"] == run)).nonzero().flatten()))
        run += 1
    return found


@quick
@given(EXAMPLES)
def test_every_example_has_the_tokens_and_positions_that_it_has_alone(examples):
    batch, groups = pack_of(examples)
    for number, places in places_of(batch, groups):
        alone, grids = examples[number], [GRIDS[key] for key in examples[number].image_keys]
        assert batch["input_ids"][0, places].tolist() == alone.expanded(IMAGE)[0].tolist()
        expected, _ = prefix_positions(alone.token_ids, IMAGE, grids, MERGE)
        assert batch["position_ids"][:, 0, places].tolist() == expected.tolist()


@quick
@given(EXAMPLES)
def test_every_supervised_token_is_predicted_once_from_the_token_before_it(examples):
    weights = [1.0 + number for number in range(len(examples))]
    batch, groups = pack_of(examples, weights=weights)
    found = iter(
        zip(*(batch[name].flatten().tolist() for name in ("logits_to_keep", "targets", "weights")), strict=True)
    )
    for (number, places), weight in zip(places_of(batch, groups), weights, strict=True):
        token_ids, supervised = examples[number].expanded(IMAGE)
        for place in np.flatnonzero(supervised):
            assert next(found) == (places[place - 1], token_ids[place], weight)
    assert not list(found)


@quick
@given(EXAMPLES)
def test_the_runs_of_a_pack_lie_one_after_the_other_each_behind_its_prefix(examples):
    batch, _ = pack_of(examples)
    run, prefix = batch["run"], batch["prefix"]
    assert (run.diff() >= 0).all() and (prefix <= run).all()
    assert all((prefix[run == number] == number).all() for number in prefix.unique())


@quick
@given(EXAMPLES, st.integers(0, 7))
def test_padding_is_a_run_of_its_own_that_predicts_nothing(examples, num_padding):
    whole, groups = pack_of(examples)
    length = whole["input_ids"].shape[1]
    padded, _ = pack_of(examples, length + num_padding)
    for name in ("logits_to_keep", "targets", "weights"):
        assert torch.equal(padded[name], whole[name])
    for name in ("input_ids", "position_ids", "run", "prefix"):
        assert padded[name].shape[-1] == length + num_padding
        assert torch.equal(padded[name][..., :length], whole[name])
    assert (padded["input_ids"][0, length:] == PAD).all()
    own = padded["run"][length:]
    assert torch.equal(padded["prefix"][length:], own) and not torch.isin(own, whole["run"]).any()


def test_a_pack_longer_than_it_may_be_is_our_mistake():
    with pytest.raises(AssertionError):
        pack_of([example("a", ([5], [6]))], 7)


def test_indices_are_whole_numbers_of_64_bits_and_weights_floats():
    batch, _ = pack_of([example("a", ([5], [6]))])
    kinds = {name: tensor.dtype for name, tensor in batch.items()}
    assert {kinds.pop("run"), kinds.pop("prefix")} == {torch.int32}
    assert kinds.pop("weights") == torch.float32
    assert set(kinds.values()) == {torch.int64}
