"""A pack is cut into segments whose tokens continue one another, as its mask says."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.train.model.attention import dense_mask
from lookonce.train.model.segments import segments_of

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


@given(trees=TREES.filter(len), padding=st.integers(0, 3), num_before=st.integers(0, 4))
def test_the_tokens_before_a_segment_and_its_own_are_those_that_its_last_one_attends_to(trees, padding, num_before):
    ends = seen_until(trees)
    ends = torch.tensor(ends + [len(ends) + padding] * padding, dtype=torch.int32)
    segments, allowed, length = segments_of(ends, num_before), dense_mask(ends)[0, 0], len(ends)
    paths, results, number = [], [], 0
    for depth, rows in enumerate(segments.depths):
        whole = []
        for tokens, parent in zip(rows.tokens.tolist(), rows.parents.tolist(), strict=True):
            own = [token for token in tokens[num_before:] if token < length]
            earlier = paths[-1][parent] if depth else []
            whole.append(earlier + own)
            assert whole[-1] == allowed[own[-1]].nonzero()[:, 0].tolist()
            filled = [length] * num_before + earlier
            assert tokens[:num_before] == filled[len(filled) - num_before :]
            results += tokens[num_before:]
            assert segments.numbers[own].tolist() == [number] * len(own)
            assert segments.last[number].tolist() == (filled + own)[len(filled + own) - num_before :]
            number += 1
        paths.append(whole)
    assert [results[place] for place in segments.places] == [*range(length)]


def test_segments_begin_where_a_branch_does_and_no_token_continues_another_image():
    ends = torch.tensor([7, 7, 5, 4, 5, 7, 7, 9, 9])
    first, second, third = segments_of(ends, 2).depths
    assert first.tokens.tolist() == [[9, 9, 0, 1], [9, 9, 7, 8]]
    assert second.tokens.tolist() == [[0, 1, 2, 9], [0, 1, 5, 6]] and second.parents.tolist() == [0, 0]
    assert third.tokens.tolist() == [[1, 2, 3], [1, 2, 4]] and third.parents.tolist() == [0, 0]
