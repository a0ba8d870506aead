"""Which questions are answered together, and how far their answers are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.eval.decoding.batches import BatchLayout, Branches, Room, plan_batches
from lookonce.eval.decoding.passes import Rows
from lookonce.eval.decoding.sampling import Chooser
from lookonce.train.data.batches import PackCollator
from lookonce.train.data.packing import BLOCK, Group, Pack, group_examples
from lookonce.train.data.tokenize import Example
from lookonce.train.model.attention import attends, dense_mask

quick = settings(deadline=None, database=None, max_examples=40)
START, IMAGE, END = 97, 98, 99
GRIDS = {"a": (1, 4, 4), "b": (1, 2, 6)}


def question(image: str, words: list[int]) -> Example:
    token_ids = [7, *([START, IMAGE, END] if image else []), *words, 8]
    sizes = tuple(t * h * w // 4 for t, h, w in [GRIDS[image]] if image) if image else ()
    return Example(
        np.array(token_ids, np.int32), np.zeros(len(token_ids), bool), (image,) if image else (), sizes, "a record"
    )


PROMPTS = st.lists(
    st.builds(question, st.sampled_from(["", "a", "b"]), st.lists(st.integers(1, 3), max_size=5)),
    min_size=1,
    max_size=12,
)
ROOMS = st.builds(
    Room,
    st.integers(1, 120),
    st.integers(1, 60),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(1, 3),
)


@quick
@given(PROMPTS, ROOMS, st.data())
def test_each_question_is_in_one_batch_and_batches_fit_unless_one_question_does_not(prompts, room, data):
    behind = data.draw(st.lists(st.integers(1, 9), min_size=len(prompts), max_size=len(prompts)))
    batches = plan_batches(prompts, behind, IMAGE, room)
    assert sorted(number for batch in batches for number in batch) == list(range(len(prompts)))
    for batch in batches:
        groups = group_examples([prompts[number] for number in batch], IMAGE)
        num_slots = sum(group.num_tokens for group in groups) + sum(behind[number] for number in batch)
        num_answers = len(batch) * room.num_samples
        assert (num_slots <= room.num_slots and num_answers <= (room.num_states or 99)) or len(batch) == 1


@quick
@given(PROMPTS, ROOMS)
def test_tokens_and_the_room_behind_them_have_slots_of_their_own(examples, room):
    whole = BatchLayout.of(examples, IMAGE, room)
    until, used, path_of = torch.from_numpy(whole.until), set(), []
    for pack, own, last in zip(whole.packs, whole.slots, whole.last, strict=True):
        batch = PackCollator(IMAGE, 0, 2, SimpleNamespace(grid_thw=GRIDS.__getitem__, kept=lambda key: None))(
            pack.groups, examples, [0.0] * pack.num_samples, pack.num_tokens
        )
        slots = torch.from_numpy(own)
        found, expected = (
            attends(slots[:, None], slots[None], until[slots][None]),
            dense_mask(batch["seen_until"])[0, 0],
        )
        assert torch.equal(found, expected), "each token attends to what it does in a pack"
        path_of += [{*own[expected[index]]} for index in last]
        assert len(set(own)) == len(own) == pack.num_tokens and not used & set(own)
        used |= set(own)
    for number, begin in enumerate(whole.begin):
        room_behind = np.arange(begin, begin + room.max_new_tokens)
        latest = room_behind[-1]
        attended = np.flatnonzero(attends(latest, np.arange(len(until)), whole.until))
        assert {*attended} == path_of[number // room.num_samples] | {*room_behind} and not used & {*room_behind}
        used |= set(room_behind)
    numbers = range(len(examples) * room.num_samples)
    assert sorted(whole.examples) == [*numbers] and used == set(range(1, len(whole.until)))
    assert np.flatnonzero(attends(0, np.arange(len(until)), whole.until)).tolist() == [0], "padding attends to itself"


def test_a_batch_does_not_depend_on_the_batches_after_it():
    prompts, room = [question("a", [1, word, 2]) for word in range(9)], Room(40, 100, 4)
    batches = plan_batches(prompts, [4] * 9, IMAGE, room)
    assert len(batches) > 2
    few = prompts[: len(batches[0])]
    assert plan_batches(few, [4] * len(few), IMAGE, room) == batches[:1]


END_TOKEN = 2


@pytest.fixture
def branches() -> Branches:
    unused = Branches.unused(3, 9, 4, Chooser(END_TOKEN), torch.device("cpu"))
    return replace(unused, examples=torch.arange(3), ended=torch.zeros(3, dtype=torch.bool))


def add(branches: Branches, number: int, logits: torch.Tensor) -> None:
    branches.add(torch.tensor([number]), logits, Chooser(END_TOKEN))


def test_an_answer_takes_the_likeliest_token_until_its_end_token(branches):
    chosen = [[0, 2, 1], [2, 0, 1], [1, 1, 2]]
    for number, best in enumerate(chosen):
        add(branches, number, torch.eye(3)[best] * 5)
    assert branches.tokens.tolist() == [[0, 2, 2, 2], [2, 2, 2, 2], [1, 1, 2, 2]]
    assert branches.ended.tolist() == [True, True, True]
    given = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    assert torch.allclose(branches.logprobs[..., 0], given * torch.tensor([5.0, 0, 0]).log_softmax(0)[0])


def test_the_first_of_equally_likely_tokens_is_taken_as_by_generate(branches):
    add(branches, 0, torch.zeros(3, 3))
    assert branches.tokens[:, 0].tolist() == torch.zeros(3, 3).argmax(-1).tolist()


def test_only_branches_that_go_on_advance(branches):
    add(branches, 0, torch.eye(3)[[0, 2, 1]])
    branches.advance()
    assert branches.slot.tolist() == [10, 9, 10] and branches.position.tolist() == [1, 0, 1]


NEW_TOKENS, ROWS = 40, 16


def group(first: int, num_prefix_tokens: int, *branch_tokens: int) -> Group:
    examples = tuple(range(first, first + len(branch_tokens)))
    return Group(examples, num_prefix_tokens, num_prefix_tokens, branch_tokens)


PACKS = (Pack((group(0, 500, *[3] * 24), group(24, 0, 9))), Pack((group(25, 130, 1, 300), group(27, 1, *[20] * ROWS))))
"""One image has more questions than a block has rows; one question has no image."""


@pytest.fixture
def layout() -> BatchLayout:
    return BatchLayout.of_packs([], [*PACKS], NEW_TOKENS)


def test_branches_have_rows_of_their_own_in_blocks_of_one_image(layout):
    rows, prefix = Rows.of(layout.spans, ROWS), layout.spans.first
    assert len(set(rows.of_token)) == len(prefix) and len(rows.first) == len(rows.end) == 5
    for block in range(5):
        assert len(set(prefix[rows.of_token // ROWS == block])) == 1


def test_a_block_of_rows_reads_all_keys_that_its_branches_attend_to_and_few_others(layout):
    rows = Rows.of(layout.spans, ROWS)
    slots = np.arange(len(layout.until))
    for number, row in enumerate(rows.of_token):
        blocks = np.flatnonzero(attends(layout.begin[number] + NEW_TOKENS - 1, slots, layout.until)) // BLOCK
        assert rows.first[row // ROWS] == blocks.min() and blocks.max() < rows.end[row // ROWS]
    assert rows.end.max() * BLOCK < len(slots) + BLOCK
    assert (rows.end - rows.first).sum() < 2.2 * len(slots) / BLOCK
