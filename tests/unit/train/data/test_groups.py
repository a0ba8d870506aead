"""Groups: which examples share a prefix, how long it is, and that it contains no target."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from os.path import commonprefix

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.train.data.packing import Group, group_examples, nested
from lookonce.train.data.tokenize import Example

START, IMAGE, END = 97, 98, 99
TOKENS_OF = {"a": 4, "b": 7, "c": 300}


def example(keys: str, question: list[int], answer: list[int] = (), system: list[int] = ()) -> Example:
    """An example whose answer is supervised."""
    images = [token for _ in keys for token in (START, IMAGE, END)]
    tokens = [*system, *images, *question, *answer]
    supervised = np.arange(len(tokens)) >= len(tokens) - len(answer)
    return Example(np.array(tokens, np.int32), supervised, tuple(keys), tuple(TOKENS_OF[key] for key in keys), "")


WORDS = st.lists(st.integers(0, 2), max_size=4)
EXAMPLES = st.lists(
    st.builds(example, st.sampled_from(["", "a", "b", "ab", "ba", "aa"]), WORDS.map(lambda q: [5, *q]), WORDS, WORDS),
    max_size=25,
)


def through_images(e: Example) -> list[int]:
    """The tokens up to the one after the last placeholder."""
    last = max(index for index, token in enumerate(e.token_ids) if token == IMAGE)
    return e.token_ids[: last + 2].tolist()


def prefix(group: Group, examples: list[Example], more: int = 0) -> set[tuple[int, ...]]:
    return {tuple(examples[number].token_ids[: group.len_prefix + more]) for number in group.examples}


def expanded_length(token_ids: np.ndarray, e: Example) -> int:
    sizes = iter(e.num_image_tokens)
    return sum(next(sizes) if token == IMAGE else 1 for token in token_ids)


@given(EXAMPLES)
def test_a_group_has_all_examples_with_equal_images_and_tokens_through_the_last_image(examples):
    groups = group_examples(examples, IMAGE)
    assert Counter(number for group in groups for number in group.examples) == Counter(range(len(examples)))
    assert all(list(group.examples) == sorted(group.examples) for group in groups)
    firsts = [group.examples[0] for group in groups]
    assert firsts == sorted(firsts)
    group_of = {number: index for index, group in enumerate(groups) for number in group.examples}
    for m, one in enumerate(examples):
        for n, other in enumerate(examples[:m]):
            agree = bool(one.image_keys) and one.image_keys == other.image_keys
            assert (group_of[m] == group_of[n]) == (agree and through_images(one) == through_images(other))


@pytest.mark.guarantee(
    "A pack has each token that a target is predicted from or that such a token attends to, and no other."
)
@given(EXAMPLES)
def test_the_prefix_is_as_long_as_possible_without_targets_and_branches_are_what_targets_are_predicted_from(examples):
    for group in group_examples(examples, IMAGE):
        of = [examples[number] for number in group.examples]
        assert len(prefix(group, examples)) == 1 and min(group.branch_tokens) >= 1
        assert not any(e.supervised[: group.len_prefix].any() for e in of)
        if not of[0].image_keys:
            assert group.len_prefix == 0
        else:
            is_last = any(e.supervised[group.len_prefix] or len(e.token_ids) == group.len_prefix + 1 for e in of)
            assert is_last or len(prefix(group, examples, more=1)) > 1
            assert group.len_prefix >= len(through_images(of[0]))
        for e, length in zip(of, group.branch_tokens, strict=True):
            assert group.num_prefix_tokens == expanded_length(e.token_ids[: group.len_prefix], e)
            is_needed = e.num_targets < 2  # else the last token is only a target
            assert group.num_prefix_tokens + length == e.num_tokens - (not is_needed)


@pytest.mark.parametrize(
    ("answers", "length"),
    [
        ([4, 5], 3),  # an answer, the end of the turn; then a line break
        ([4], 3),  # one token, which the branch keeps
        ([4, 5, 6], 4),
        ([2, 3, 5], 3),  # two turns: what is between them is needed
        ([], 6),  # a question without an answer
    ],
)
def test_a_branch_ends_where_its_last_target_is_predicted(answers, length):
    tokens = [START, IMAGE, END, *range(3, 9)]
    supervised = np.isin(np.arange(len(tokens)), [index + 1 for index in answers])
    conversation = Example(np.array(tokens, np.int32), supervised, ("a",), (4,), "")
    [group] = group_examples([conversation, example("a", [9])], IMAGE)
    assert (group.len_prefix, group.branch_tokens[0]) == (3, length)


def test_a_group_counts_its_prefix_once():
    examples = [example("c", [5, n], [6] * n) for n in (1, 2, 3)]
    [group] = group_examples(examples, IMAGE)
    assert (group.len_prefix, group.num_prefix_tokens, group.branch_tokens) == (4, 303, (2, 2, 3))
    assert group.num_tokens == 303 + 2 + 2 + 3
    assert group.whole(examples).branch_tokens == (2, 3, 4)


def test_two_tokens_with_the_bytes_of_a_placeholder_are_none():
    [group] = group_examples([example("a", [IMAGE << 8, 256, number], [8]) for number in (1, 2)], IMAGE)
    assert (group.examples, group.len_prefix) == ((0, 1), 5)


@given(EXAMPLES.filter(bool), st.data())
def test_some_of_a_nested_group_share_as_much_as_any_two_of_them(examples, data):
    for flat in group_examples(examples, IMAGE):
        group = nested(flat, examples)
        assert Counter(group.examples) == Counter(flat.examples)
        some = group.subset(data.draw(st.sets(st.sampled_from(range(len(group.examples))), min_size=1)))
        rows = [shareable(examples[number])[flat.len_prefix :] for number in some.examples]
        assert rows == sorted(rows, key=lambda row: np.array(row, np.int32).tobytes())
        expected = [len(commonprefix(pair)) for pair in pairwise(rows)]
        assert list(some.shared_tokens or [0] * len(rows))[1:] == expected
        assert some.num_tokens == flat.num_prefix_tokens + sum(some.branch_tokens) - sum(expected)
        assert all(shared < length for shared, length in zip(some.shared_tokens, some.branch_tokens, strict=False))


def shareable(e: Example) -> list[int]:
    """The tokens that an example may share: those before its answer, or all but the last."""
    end = int(e.supervised.argmax()) if e.supervised.any() else len(e.token_ids) - 1
    return e.token_ids[:end].tolist()


def test_an_answer_before_the_last_image_fails_an_assertion():
    supervised = np.array([False, True, False, False])
    with pytest.raises(AssertionError, match="row 7: an answer before the last image"):
        group_examples([Example(np.array([5, 8, IMAGE, END], np.int32), supervised, ("a",), (4,), "row 7")], IMAGE)


def test_questions_about_one_image_in_two_stages_are_in_two_groups():
    examples = [replace(example("a", [5, number]), stage=stage) for number, stage in enumerate([0, 1, 0])]
    groups = group_examples(examples, IMAGE)
    found = [(group.examples, group.stage, group.subset([0]).stage) for group in groups]
    assert found == [((0, 2), 0, 0), ((1,), 1, 1)]
