"""What is known without a GPU of the trial before training: what it records, what it says, and when."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lookonce.run.config import BatchSection
from lookonce.train.data.sampler import Order
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.session import can_record
from lookonce.train.loop.warmup import Trial, WarmUp, kinds
from lookonce.train.model.cuda_graphs import shape_of

IMAGE = 98
GIGABYTE = 10**9


def example(key: str, number: int, num_tokens: int) -> Example:
    tokens = [*([97, IMAGE, 99] if key else []), number, *[5] * 70]
    supervised = np.arange(len(tokens)) >= len(tokens) - 70
    return Example(np.array(tokens, np.int32), supervised, tuple(key), (num_tokens,) * len(key), "")


def test_of_each_shape_to_come_one_pass_is_recorded_the_longest_first():
    examples = [example("abc "[n % 4].strip(), 100 + n, 150 * (n % 4 + 1)) for n in range(60)]
    order = Order.of(examples, IMAGE, BatchSection(samples_per_step=4, tokens_per_pack=1500), seed=0)
    found = kinds(order, 0, 40)

    def shape(forward):
        keys = [examples[group.examples[0]].image_keys for group in forward.pack.groups]
        return shape_of(forward.pack.num_tokens, order.num_targets(forward), any(keys))

    assert all(shape(forward) == of for of, forward in found.items()) and len(found) > 3
    assert found.keys() == {shape(forward) for step in order.steps(0, 40) for forward in step}
    assert [length for length, _, _ in found] == sorted((length for length, _, _ in found), reverse=True)


@pytest.mark.parametrize(
    ("num_recorded", "expected"), [(0, "; this needs"), (31, ", recorded 31 shapes of packs in 8.3 s; ")]
)
def test_it_says_what_it_has_tried_and_what_it_needs(num_recorded, expected):
    text = Trial(5416, 39.8, num_recorded, 8.3, 47 * GIGABYTE, 150 * GIGABYTE).text()
    assert text.startswith("tried the longest pack, 5,416 tokens, in 39.8 s, compilation included")
    assert expected in text and text.endswith("this needs 47.0 GB of this GPU's 150.0 GB")


def test_what_was_tried_is_told_and_kept(monkeypatch):
    trial, notes = Trial(5416, 39.8, 0, 0.0, 47 * GIGABYTE, 150 * GIGABYTE), []
    monkeypatch.setattr("lookonce.train.loop.warmup.try_out", lambda trainer: trial)
    warm_up = WarmUp(SimpleNamespace(feed=SimpleNamespace(in_blocks=True)), notes.append)
    warm_up.on_train_begin(None, SimpleNamespace(global_step=0, max_steps=9), None)
    assert notes == [trial.text()] and warm_up.trial is trial


@pytest.mark.parametrize(("in_blocks", "step"), [(False, 0), (True, 9)])
def test_nothing_is_tried_where_packs_need_not_be_padded_or_no_step_is_left(in_blocks, step):
    trainer = SimpleNamespace(feed=SimpleNamespace(in_blocks=in_blocks))
    WarmUp(trainer, pytest.fail).on_train_begin(None, SimpleNamespace(global_step=step, max_steps=9), None)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"cuda_graphs": False}, False),
        ({"gradient_checkpointing": True}, False),
        ({"fsdp": True}, True),
        ({"fsdp": True, "world_size": 2}, False),
        ({"world_size": 2}, True),
        ({"fp16": True}, False),
        ({"has_tower": True}, False),
        ({"mode": "separate"}, False),
        ({"mode": "packed"}, True),
        ({"device": "cpu"}, False),
    ],
    ids=str,
)
def test_passes_are_recorded_where_they_are_the_same_work_each_time(make_run, changes, expected):
    train = {key: value for key, value in changes.items() if key in ("cuda_graphs", "gradient_checkpointing", "fsdp")}
    run = make_run(train=train, batch={"mode": changes.get("mode", "shared")})
    device = torch.device(changes.get("device", "cuda"))
    arguments = SimpleNamespace(world_size=changes.get("world_size", 1), fp16=changes.get("fp16", False), device=device)
    vision = SimpleNamespace(has_tower=changes.get("has_tower", False))
    assert can_record(run, arguments, vision) is expected
