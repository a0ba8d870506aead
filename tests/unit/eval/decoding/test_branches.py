"""Answers grow by the likeliest token, and not behind their end token."""

from __future__ import annotations

import pytest
import torch

from lookonce.eval.decoding.branches import Branches

END = 2


@pytest.fixture
def branches() -> Branches:
    numbers = torch.arange(3)
    return Branches(
        *(numbers.clone() for _ in range(5)),
        tokens=torch.full((3, 4), END),
        logprobs=torch.zeros(3, 4),
        ended=torch.zeros(3, dtype=torch.bool),
    )


def test_an_answer_takes_the_likeliest_token_until_its_end_token(branches):
    chosen = [[0, 2, 1], [2, 0, 1], [1, 1, 2]]
    for number, best in enumerate(chosen):
        branches.add(number, torch.eye(3)[best] * 5, END)
    assert branches.tokens.tolist() == [[0, 2, 2, 2], [2, 2, 2, 2], [1, 1, 2, 2]]
    assert branches.ended.tolist() == [True, True, True]
    given = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    assert torch.allclose(branches.logprobs, given * torch.tensor([5.0, 0, 0]).log_softmax(0)[0])


def test_the_first_of_equally_likely_tokens_is_taken_as_by_generate(branches):
    branches.add(0, torch.zeros(3, 3), END)
    assert branches.tokens[:, 0].tolist() == torch.zeros(3, 3).argmax(-1).tolist()


def test_a_subset_has_the_state_of_its_branches(branches):
    branches.add(0, torch.eye(3), END)
    some = branches.subset(torch.tensor([2, 0]))
    assert some.examples.tolist() == [2, 0] and some.tokens[:, 0].tolist() == [2, 0]
    assert some.ended.tolist() == [True, False] and some.logprobs.shape == (2, 4)
