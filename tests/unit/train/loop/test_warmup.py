"""The trial before training, as far as it needs no GPU: which passes are captured, its report, and when it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lookonce.run.sections import BatchSection
from lookonce.run.startup import Startup
from lookonce.train.data.dataset import PackIndices
from lookonce.train.data.sampler import Sampler
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.trainer import PackTrainer
from lookonce.train.loop.warmup import Trial, WarmUp, largest, packs_by_shape
from lookonce.train.model.packs import shape_of

IMAGE = 98
GIGABYTE = 10**9


def example(key: str, number: int, num_tokens: int) -> Example:
    tokens = [*([97, IMAGE, 99] if key else []), number, *[5] * 70]
    supervised = np.arange(len(tokens)) >= len(tokens) - 70
    return Example(np.array(tokens, np.int32), supervised, tuple(key), (num_tokens,) * len(key), "")


def test_one_micro_batch_of_each_upcoming_shape_is_captured_the_longest_first():
    examples = [example("abc "[n % 4].strip(), 100 + n, 150 * (n % 4 + 1)) for n in range(60)]
    sampler = Sampler.of(examples, IMAGE, BatchSection(samples_per_step=4, tokens_per_pack=1500), seed=0)
    packs = [PackIndices(each, True, 1, sampler.batch) for step in sampler.steps(0, 40) for each in step]
    found = packs_by_shape(packs, examples)

    def shape(indices):
        keys = [examples[group.examples[0]].image_keys for group in indices.micro_batch.pack.groups]
        num_targets = sum(examples[index].num_targets for index in indices)
        return shape_of(indices.micro_batch.pack.num_tokens, num_targets, any(keys))

    assert all(shape(indices) == of for of, indices in found.items()) and len(found) > 3
    assert found.keys() == {shape(indices) for indices in packs}
    assert [length for length, _, _ in found] == sorted((length for length, _, _ in found), reverse=True)


@pytest.mark.parametrize(
    ("num_shapes", "expected"),
    [(0, "; needs"), (31, ", captured as a CUDA graph in 0.3 s (each of 31 pack shapes is when it first appears); ")],
)
def test_the_trial_reports_its_duration_and_the_memory_it_needs(num_shapes, expected):
    text = Trial(5416, 39.8, num_shapes, 0.3, 47 * GIGABYTE, 150 * GIGABYTE).text()
    assert text.startswith("warm-up: longest pack (5,416 tokens) in 39.8 s, including compilation")
    assert expected in text and text.endswith("needs 47.0 GB of this GPU's 150.0 GB")


def test_the_largest_shapes_have_the_most_tokens_and_the_most_targets():
    assert largest([(900, 64, True), (800, 256, False), (700, 128, True)]) == [(900, 64, True), (800, 256, False)]
    assert largest([(900, 64, True), (800, 64, True)]) == [(900, 64, True)]


def trainer_of(pads_to_blocks: bool, startup: Startup, compile_cache: Any = None) -> Any:
    collator = SimpleNamespace(pads_to_blocks=pads_to_blocks)
    return SimpleNamespace(collator=collator, startup=startup, compile_cache=compile_cache, compiled_apart=0)


def test_the_trial_uses_compiled_code_that_is_kept_and_is_reported(monkeypatch):
    trial, notes = Trial(5416, 39.8, 0, 0.0, 47 * GIGABYTE, 150 * GIGABYTE), []
    monkeypatch.setattr("lookonce.train.loop.warmup.run_trial", lambda trainer, startup: trial)
    kept = SimpleNamespace(load=lambda: notes.append("load"), save=lambda: notes.append("save"))
    warm_up = WarmUp(trainer_of(True, Startup(notes.append), kept))
    warm_up.on_train_begin(None, SimpleNamespace(global_step=0, max_steps=9), None)
    assert notes == ["load", "load compiled code: 0.0 s", "save", "keep compiled code: 0.0 s", trial.text()]
    assert warm_up.trial is trial


def test_the_first_step_ends_the_start():
    notes, state = [], SimpleNamespace(global_step=0, max_steps=9)
    warm_up = WarmUp(trainer_of(False, Startup(notes.append)))
    warm_up.on_train_begin(None, state, None)
    assert notes == []
    for _ in range(2):
        warm_up.on_step_begin(None, state, None)
    assert notes == ["first step after 0.0 s"]


@pytest.mark.parametrize(("pads_to_blocks", "step"), [(False, 0), (True, 9)])
def test_there_is_no_trial_without_padded_packs_or_when_no_step_is_left(pads_to_blocks, step):
    state = SimpleNamespace(global_step=step, max_steps=9)
    WarmUp(trainer_of(pads_to_blocks, Startup(pytest.fail))).on_train_begin(None, state, None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"checkpointing": True}, True),
        ({"checkpointing": "selective"}, True),
        ({"checkpointing": "selective", "compiled": False}, False),
        ({"compiled": False}, True),
        ({"is_sharded": True}, False),
        ({"fp16": True}, False),
        ({"has_tower": True}, False),
        ({"has_linear_attention": True}, False),
        ({"has_packs": False}, False),
        ({"device": "cpu"}, False),
    ],
    ids=str,
)
def test_passes_are_captured_where_they_are_always_the_same_work(monkeypatch, changes, expected):
    monkeypatch.setattr("lookonce.train.loop.trainer.is_sharded", lambda model: changes.get("is_sharded", False))
    layer = SimpleNamespace(**{"linear_attn": None} if changes.get("has_linear_attention") else {})
    model = SimpleNamespace(model=SimpleNamespace(language_model=SimpleNamespace(layers=[layer])))
    arguments = SimpleNamespace(fp16=changes.get("fp16", False), device=torch.device(changes.get("device", "cuda")))
    dataset = SimpleNamespace(features=SimpleNamespace(has_tower=changes.get("has_tower", False)))
    batch = SimpleNamespace(has_packs=changes.get("has_packs", True))
    trainer: Any = SimpleNamespace(
        train_sampler=SimpleNamespace(batch=batch, dataset=dataset),
        checkpointing=changes.get("checkpointing", False),
        compiled=changes.get("compiled", True),
    )
    assert PackTrainer._can_capture(trainer, model, arguments) is expected
