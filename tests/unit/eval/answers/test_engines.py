"""Fewer questions are answered together if the GPU is out of memory, and one that does not fit is named."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lookonce.errors import TrainingError
from lookonce.eval.answers import engines
from lookonce.eval.answers.engines import SharedPrefixes
from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.families.qwen3_5 import QWEN3_5
from lookonce.families.qwen3_vl import QWEN3_VL
from lookonce.train.data.tokenize import Example

QUESTIONS = [
    Dialogue(Example(np.arange(9, dtype=np.int32), np.zeros(9, bool), (), (), f"val.jsonl:{line}")) for line in range(7)
]


def origins(dialogues) -> list[str]:
    return [dialogue.first.origin for dialogue in dialogues]


@pytest.fixture
def prompter(make_run) -> SimpleNamespace:
    chat = SimpleNamespace(image_token_id=-1)
    run, model = make_run(eval={"tokens_per_wave": 32768, "max_new_tokens": 8}), SimpleNamespace(family=QWEN3_VL)
    return SimpleNamespace(run=run, model_folder=model, chat_tokenizer=chat, features=None)


@pytest.fixture
def engine(prompter) -> SharedPrefixes:
    return SharedPrefixes(prompter)


@pytest.fixture
def fits(monkeypatch):
    """Sets how many questions fit into the memory; gives the numbers of questions that were tried."""

    def set_memory(most: int) -> list[int]:
        class Memory:
            def __init__(self, model, chat, source, room, dtype, by_rows, compiled):
                self.model, self.room, self.compiled = model, room, by_rows and compiled

            def answers(self, waves):
                for wave in waves:
                    tried.append(len(wave))
                    if len(wave) > most:
                        raise torch.OutOfMemoryError
                    yield origins(wave)

        tried: list[int] = []
        monkeypatch.setattr(engines, "Decoder", Memory)
        return tried

    return set_memory


def test_out_of_memory_halves_the_wave_and_all_questions_are_answered_in_order(engine, fits):
    tried, notes = fits(2), []
    found = engine.answers(torch.nn.Linear(1, 1), QUESTIONS, notes.append)
    assert found == origins(QUESTIONS)
    assert tried == [7, 3, *[1] * 7] and engine.room.num_places == 29
    assert notes[0] == "out of memory; answering 59 tokens at a time; set a lower `eval.tokens_per_wave`"


def test_waves_that_fit_are_answered_once_and_those_after_one_that_does_not_in_order(engine, fits):
    tried, waves = fits(3), [QUESTIONS[:3], QUESTIONS[3:], QUESTIONS[:2]]
    found = list(engine.stream(torch.nn.Linear(1, 1), waves))
    assert found == [origins(wave) for wave in waves] and tried == [3, 4, 2, 2, 2]


def test_a_question_that_does_not_fit_is_named(engine, fits):
    fits(0)
    message = r"out of memory for one question of 9 tokens \(val.jsonl:0\); lower `eval.max_new_tokens` or use a larger"
    with pytest.raises(TrainingError, match=message):
        engine.answers(torch.nn.Linear(1, 1), QUESTIONS)


@pytest.mark.parametrize(
    ("make", "is_compiled"),
    [
        (partial(SharedPrefixes, min_compiled=7), True),
        (SharedPrefixes, False),
        (partial(SharedPrefixes, min_compiled=0), True),
    ],
)
def test_layers_are_compiled_on_a_gpu_for_many_questions_and_in_measurements(
    prompter, fits, monkeypatch, make, is_compiled
):
    fits(7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = make(prompter)
    engine.plan(QUESTIONS)
    assert engine.decoder_of(torch.nn.Linear(1, 1)).compiled == is_compiled


def test_only_waves_of_models_with_linear_attention_have_a_limit_of_states(prompter):
    assert SharedPrefixes(prompter).room.num_states is None
    prompter.model_folder.family = QWEN3_5
    assert SharedPrefixes(prompter).room.num_states == 32768 // 64
