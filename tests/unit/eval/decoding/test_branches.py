"""Answers grow by the likeliest token, and not behind their end token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lookonce.eval.decoding.waves import Branches

END = 2


@pytest.fixture
def branches() -> Branches:
    unused = Branches.unused(3, 9, 4, END, torch.device("cpu"))
    return replace(unused, examples=torch.arange(3), ended=torch.zeros(3, dtype=torch.bool))


def add(branches: Branches, number: int, logits: torch.Tensor) -> None:
    branches.add(torch.tensor([number]), logits, END)


def test_an_answer_takes_the_likeliest_token_until_its_end_token(branches):
    chosen = [[0, 2, 1], [2, 0, 1], [1, 1, 2]]
    for number, best in enumerate(chosen):
        add(branches, number, torch.eye(3)[best] * 5)
    assert branches.tokens.tolist() == [[0, 2, 2, 2], [2, 2, 2, 2], [1, 1, 2, 2]]
    assert branches.ended.tolist() == [True, True, True]
    given = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    assert torch.allclose(branches.logprobs, given * torch.tensor([5.0, 0, 0]).log_softmax(0)[0])


def test_the_first_of_equally_likely_tokens_is_taken_as_by_generate(branches):
    add(branches, 0, torch.zeros(3, 3))
    assert branches.tokens[:, 0].tolist() == torch.zeros(3, 3).argmax(-1).tolist()


def test_a_subset_has_the_state_of_its_branches(branches):
    add(branches, 0, torch.eye(3))
    some = branches.subset(torch.tensor([2, 0]))
    assert some.examples.tolist() == [2, 0] and some.tokens[:, 0].tolist() == [2, 0]
    assert some.ended.tolist() == [True, False] and some.logprobs.shape == (2, 4)


def test_only_branches_that_go_on_advance(branches):
    add(branches, 0, torch.eye(3)[[0, 2, 1]])
    branches.advance()
    assert branches.place.tolist() == [10, 9, 10] and branches.position.tolist() == [1, 0, 1]


def test_others_are_loaded_into_the_same_tensors(branches):
    static = Branches.unused(5, 9, 4, END, torch.device("cpu"))
    pointers = [column.data_ptr() for column in vars(static).values()]
    static.load(branches)
    assert [column.data_ptr() for column in vars(static).values()] == pointers
    assert static.examples.tolist() == [0, 1, 2, -1, -1] and static.ended.tolist() == [False] * 3 + [True] * 2
