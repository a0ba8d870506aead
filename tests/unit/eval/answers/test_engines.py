"""The ways to answer questions, and how many are answered together."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.datasets.records import Record, Turn
from lookonce.errors import TrainingError
from lookonce.eval.answers import engines
from lookonce.eval.answers.engines import SharedPrefixes, greedy_answers, largest_batch, states_per_batch
from lookonce.eval.decoding.buffers import bytes_per_state, bytes_per_token
from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.families.qwen3_5 import QWEN3_5
from lookonce.families.qwen3_vl import QWEN3_VL
from lookonce.train.data.batches import CachedFeatures, RowCollator
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model.load import load_without_tower

QUESTIONS = [
    Dialogue(Example(np.arange(9, dtype=np.int32), np.zeros(9, bool), (), (), f"val.jsonl:{line}")) for line in range(7)
]


def origins(dialogues) -> list[str]:
    return [dialogue.first.origin for dialogue in dialogues]


@pytest.fixture
def prompter(make_run) -> SimpleNamespace:
    chat = SimpleNamespace(image_token_id=-1)
    run, model = make_run(eval={"tokens_per_batch": 32768, "max_new_tokens": 8}), SimpleNamespace(family=QWEN3_VL)
    return SimpleNamespace(run=run, model_folder=model, chat_tokenizer=chat, features=None)


@pytest.fixture
def engine(prompter) -> SharedPrefixes:
    return SharedPrefixes(prompter)


@pytest.fixture
def fits(monkeypatch):
    """Sets how many questions fit into the memory; gives the numbers of questions that were tried."""

    def set_memory(most: int) -> list[int]:
        class Memory:
            def __init__(self, model, chat, source, room, dtype, sampling, by_rows, compiled):
                self.model, self.room, self.compiled = model, room, by_rows and compiled

            def answers(self, batches):
                for batch in batches:
                    tried.append(len(batch))
                    if len(batch) > most:
                        raise torch.OutOfMemoryError
                    yield [prompt.origin for prompt in batch]

        tried: list[int] = []
        monkeypatch.setattr(engines, "Decoder", Memory)
        return tried

    return set_memory


def test_a_batch_has_room_for_all_answers_and_later_questions(engine):
    engine.room = replace(engine.room, num_slots=40)
    assert engine.plan(QUESTIONS) == [[0, 1], [2, 3], [4, 5], [6]]  # 9 + 8 slots each
    later = replace(QUESTIONS[1], later=(np.zeros(5, np.int32),))  # 8 + 5 more
    assert engine.plan([QUESTIONS[0], later, QUESTIONS[2]]) == [[0], [1], [2]]


def test_out_of_memory_halves_the_batch_and_all_questions_are_answered_in_order(engine, fits):
    tried, notes = fits(2), []
    [found] = engine.stream(torch.nn.Linear(1, 1), [QUESTIONS], notes.append)
    assert found == [[one] for one in origins(QUESTIONS)]
    assert tried == [7, 3, *[1] * 7] and engine.room.num_slots == 29
    assert notes[0] == "out of memory; answering 59 tokens at a time; set a lower `eval.tokens_per_batch`"


def test_batches_that_fit_are_answered_once_and_those_after_one_that_does_not_in_order(engine, fits):
    tried, batches = fits(3), [QUESTIONS[:3], QUESTIONS[3:], QUESTIONS[:2]]
    found = list(engine.stream(torch.nn.Linear(1, 1), batches))
    assert found == [[[one] for one in origins(batch)] for batch in batches] and tried == [3, 4, 2, 2, 2]


def test_a_question_that_does_not_fit_is_named(engine, fits):
    fits(0)
    message = r"out of memory for one question of 9 tokens \(val.jsonl:0\); lower `eval.max_new_tokens` or use a larger"
    with pytest.raises(TrainingError, match=message):
        [*engine.stream(torch.nn.Linear(1, 1), [QUESTIONS])]


@pytest.mark.parametrize(
    ("make", "is_compiled"), [(partial(SharedPrefixes, min_compiled=7), True), (SharedPrefixes, False)]
)
def test_layers_are_compiled_on_a_gpu_for_many_questions_and_in_measurements(
    prompter, fits, monkeypatch, make, is_compiled
):
    fits(7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = make(prompter)
    engine.plan(QUESTIONS)
    assert engine.decoder_of(torch.nn.Linear(1, 1)).compiled == is_compiled


TEXT_8B = SimpleNamespace(num_hidden_layers=36, num_key_value_heads=8, head_dim=128, vocab_size=151_936)
LINEAR_9B = SimpleNamespace(
    num_hidden_layers=32,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=248_320,
    layer_types=["full_attention" if number % 4 == 3 else "linear_attention" for number in range(32)],
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
"""Qwen3.5 9B: a state of 2 MiB in each of 24 layers, and 32 kB a token in the 8 others."""


def model(text: SimpleNamespace, weight_gb: float) -> SimpleNamespace:
    config = SimpleNamespace(dtype=torch.bfloat16, get_text_config=lambda: text)
    return SimpleNamespace(config=config, num_weight_bytes=int(weight_gb * 1e9))


@pytest.fixture
def gpu(monkeypatch):
    def set_memory(gb: float) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=int(gb * 1e9))
        )

    return set_memory


@pytest.mark.parametrize(
    ("gb", "text", "weight_gb", "tokens"),
    [(141, LINEAR_9B, 19, 65_536), (24, TEXT_8B, 17.5, 8192), (16, TEXT_8B, 17.5, 4096)],
)
def test_batches_grow_with_the_memory_beside_the_weights(gpu, gb, text, weight_gb, tokens):
    gpu(gb)
    assert largest_batch(model(text, weight_gb), torch.bfloat16) == tokens


def test_the_states_of_a_batch_fit_beside_its_tokens():
    """As few tokens to a question as there may be."""
    tokens, states = 32_768, states_per_batch(SimpleNamespace(family=QWEN3_5), 32_768)
    needed = bytes_per_token(LINEAR_9B, torch.bfloat16) * tokens + bytes_per_state(LINEAR_9B, torch.bfloat16) * states
    assert 25e9 < needed < 80e9 * 0.9 - 19e9 - 2e9
    assert states_per_batch(SimpleNamespace(family=QWEN3_5), 10) == 1
    assert states_per_batch(SimpleNamespace(family=QWEN3_VL), 10) is None


def test_answers_are_greedy_whatever_the_models_generation_settings(built, sample, make_run, tmp_path):
    shutil.copytree(sample / "model", tmp_path / "model")
    settings = {"repetition_penalty": 50.0, "do_sample": True, "temperature": 9.0, "no_repeat_ngram_size": 1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    answers = []
    for folder in (sample / "model", tmp_path / "model"):
        model_folder = ModelFolder.open(str(folder))
        chat_tokenizer = ChatTokenizer(folder, model_folder.config)
        key = min(built.keys())
        record = Record((Path("a"),), (Turn("Is there text?", "yes"),))
        question = chat_tokenizer.question(record, 0, [key], [built.grid_thw(key)])
        collator = RowCollator(
            CachedFeatures(built), chat_tokenizer.image_token_id, chat_tokenizer.tokenizer.pad_token_id
        )
        model = load_without_tower(model_folder, torch.float32)
        run = SimpleNamespace(eval=SimpleNamespace(max_new_tokens=12), train=SimpleNamespace(precision="fp32"))
        opened = SimpleNamespace(run=run, chat_tokenizer=chat_tokenizer)
        answers.append(greedy_answers(opened, model, collator, [question]))
    assert answers[0] == answers[1] and answers[0][0].text and answers[0][0].logprob < 0
