"""A pack is cut into segments whose tokens continue one another, as its mask says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.train.model.attention import dense_mask
from lookonce.train.model.linear_attention import segments_of

TREES = st.recursive(st.just([]), lambda children: st.lists(st.tuples(st.integers(1, 4), children), max_size=3))
"""Branches with their lengths and their own branches."""


def seen_until(trees: list, start: int = 0) -> list[int]:
    """The index before which later tokens attend to each token, in a pack of these trees."""
    found: list[int] = []
    for length, branches in trees:
        inner = seen_until(branches, start + len(found) + length)
        end = start + len(found) + length + len(inner)
        found += [end] * length + inner
    return found


@pytest.mark.guarantee("A pack is cut into segments that continue one another as its mask says, at any depth.")
@given(
    trees=TREES.filter(len), padding=st.integers(0, 3), num_before=st.integers(0, 4), short=st.sampled_from([0, 2, 9])
)
def test_the_tokens_of_a_sequence_are_those_that_its_last_one_attends_to(trees, padding, num_before, short):
    ends = seen_until(trees)
    ends = torch.tensor(ends + [len(ends) + padding] * padding, dtype=torch.int32)
    segments, allowed, length = segments_of(ends, num_before, short), dense_mask(ends)[0, 0], len(ends)
    paths, results, number = [], [], 0
    for at, depth in enumerate(segments.depths):
        whole, tokens, changing = [], depth.tokens.tolist(), depth.changing.tolist()
        ends = depth.ends.tolist()
        assert ends == depth.ends_on_cpu.tolist() and len(tokens) == num_before + len(changing) == num_before + ends[-1]
        last_end = ends.pop() + num_before
        for begin, end, parent in zip(ends, [*ends[1:], last_end], depth.parents.tolist(), strict=True):
            before, sequence = tokens[begin : begin + num_before], tokens[begin + num_before : end]
            assert changing[begin:end] == sequence + [length] * (num_before if end < last_end else 0)
            earlier = paths[-1][parent] if at else []
            whole.append(earlier + sequence)
            assert whole[-1] == allowed[sequence[-1]].nonzero()[:, 0].tolist()
            filled = [length] * num_before + earlier
            assert before == filled[len(filled) - num_before :]
            own = [token for token in sequence if segments.numbers[token] == number]
            assert own and own == sequence[-len(own) :]
            assert segments.last[number].tolist() == (filled + sequence)[len(filled + sequence) - num_before :]
            number += 1
        results += changing
        paths.append(whole)
    assert [results[place] for place in segments.places] == [*range(length)]


def test_what_continues_a_short_segment_has_its_tokens_again_and_begins_where_it_did():
    ends = torch.tensor([7, 7, 7, 5, 5, 7, 7])
    first, second = segments_of(ends, 1, short=2).depths
    assert first.tokens.tolist() == [7, 0, 1, 2]
    assert second.tokens.tolist() == [2, 3, 4, 2, 5, 6] and second.parents.tolist() == [0, 0]
    [only] = segments_of(ends, 1, short=3).depths
    assert only.tokens.tolist() == [7, 0, 1, 2, 7, 0, 1, 2, 3, 4, 7, 0, 1, 2, 5, 6]
    assert segments_of(ends, 1, short=3).places.tolist() == [0, 1, 2, 7, 8, 13, 14]
