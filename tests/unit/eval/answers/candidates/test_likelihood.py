"""Packs of candidates that do not fit the memory of the GPU are computed in parts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lookonce.errors import TrainingError
from lookonce.eval.answers.candidates import likelihood
from lookonce.eval.answers.candidates.likelihood import Likelihood
from lookonce.train.data.tokenize import Example

IDS = np.arange(10, dtype=np.int32)
EXAMPLES = [Example(IDS, IDS >= 10 - number, (), (), f"val.jsonl:{number}") for number in range(1, 8)]
"""Examples with as many targets as their number."""


class Model(torch.nn.Module):
    """All tokens are equally likely; with more rows than a limit it is out of memory."""

    device = torch.device("cpu")
    model = SimpleNamespace(language_model=SimpleNamespace(layers=[]))

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, logits_to_keep, **inputs):
        if len(logits_to_keep) > self.most:
            raise torch.OutOfMemoryError
        return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), 16))


@pytest.fixture
def logprobs(monkeypatch):
    """The log-probabilities of the examples in tokens, if this many targets fit the memory."""

    def logprobs(most: int) -> list[float]:
        chat = SimpleNamespace(image_token_id=-1, merge_size=2, tokenizer=SimpleNamespace(pad_token_id=0))
        scorer = Likelihood(Model(most), chat, SimpleNamespace(grid_thw=None), 40, torch.float32, compiled=False)
        return [value / -np.log(16) for some in scorer.logprobs([EXAMPLES[:3], EXAMPLES[3:]]) for _, value in some]

    monkeypatch.setattr(likelihood, "training_on_packs", lambda model, compiled: torch.no_grad())
    return logprobs


@pytest.mark.parametrize("most", [7, 12, 99])
def test_all_are_scored_in_order_however_many_fit(logprobs, most):
    assert logprobs(most) == pytest.approx(range(1, 8))


def test_one_that_does_not_fit_is_named(logprobs):
    with pytest.raises(
        TrainingError, match=r"out of memory for one candidate of 10 tokens \(val.jsonl:7\); use a larger"
    ):
        logprobs(6)
