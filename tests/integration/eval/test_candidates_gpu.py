"""On a GPU the likeliest candidates are those of the CPU, apart from rounding."""

from __future__ import annotations

from typing import Any

import pytest
from support.trainings import COMPILED_ON_GPU

from lookonce.eval.answers.candidates import choice
from lookonce.eval.answers.candidates.choice import Choice
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding.answer import Answer
from lookonce.run.inputs import RunInputs
from lookonce.train.loop.session import Session
from lookonce.train.model.load import load_without_tower

pytestmark = COMPILED_ON_GPU


def chosen(choice: Choice, model: Any) -> list[Answer]:
    batches = choice.answer(model.eval(), range(len(choice.batches)), shows_progress=False)
    return [answer for _, answers in batches for answer in answers]


def test_float32_candidates_are_as_likely_as_on_the_cpu(make_run, random_lora, monkeypatch):
    """In packs of several lengths, compiled and not."""
    inputs = RunInputs.open(make_run(eval={"candidates": "training"}, batch={"tokens_per_pack": 2048}))
    inputs.build()
    asked = Choice.of(Questions.of(Session.open(inputs), "train"))
    assert asked and len(asked.batches) > 1
    expected = chosen(asked, random_lora(inputs, load_without_tower))
    model = random_lora(inputs, load_without_tower).to("cuda")
    for min_compiled in (0, 10**9):
        monkeypatch.setattr(choice, "MIN_COMPILED", min_compiled)
        found = chosen(asked, model)
        num_different = sum(one.text != other.text for one, other in zip(found, expected, strict=True))
        assert num_different <= len(expected) // 100
        logprobs, wanted = ([answer.logprob for answer in some] for some in (found, expected))
        assert logprobs == pytest.approx(wanted, rel=1e-3)
