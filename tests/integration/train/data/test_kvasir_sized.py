"""Steps and packs of a dataset with the sizes of Kvasir-VQA-x1, simulated."""

from __future__ import annotations

import functools
import random
from statistics import mean

import pytest
from support.groups import groups_of

from lookonce.train.data import packing, sampler
from lookonce.train.data.packing import Group, Pack, pack_step
from lookonce.train.data.sampler import epoch_steps


@functools.cache
def kvasir(num_images: int = 6500) -> list[Group]:
    """Its numbers of questions and lengths: 38 % of the images have 1 question, 29 % have 17, the others 8 to 16."""
    rng = random.Random(0)
    sizes = [rng.choices([1, 17, rng.randint(8, 16)], [38, 29, 33])[0] for _ in range(num_images)]
    return groups_of([(rng.randint(330, 1980), [rng.randint(12, 40) for _ in range(size)]) for size in sizes])


@functools.cache
def kvasir_steps(num_images: int, samples: int, questions: int | None = None) -> list[list[Group]]:
    """Its full steps."""
    return epoch_steps(kvasir(num_images), samples, questions, 0, 0)[:-1]


def num_prefixes(of_steps: list[list[Group]]) -> int:
    return sum(len(step) for step in of_steps)


def fill(ranks: list[list[Pack]], tokens_per_pack: int) -> float:
    return mean(pack.num_tokens for packs in ranks for pack in packs) / tokens_per_pack


@pytest.mark.parametrize(
    ("samples", "in_order", "looking_ahead"), [(16, 9_800, 8_800), (128, 6_900, 6_500)], ids=["16", "128"]
)
def test_looking_ahead_saves_the_prefixes_that_the_docstring_states(monkeypatch, samples, in_order, looking_ahead):
    groups = kvasir()
    assert round(num_prefixes(epoch_steps(groups, samples, None, 0, 0)), -2) == looking_ahead
    monkeypatch.setattr(sampler, "NUM_AHEAD", 1)
    assert round(num_prefixes(epoch_steps(groups, samples, None, 0, 0)), -2) == in_order


@pytest.mark.parametrize(("questions", "at_least"), [(None, 0.9), (1, 0.96)])
def test_packs_of_large_steps_are_nine_tenths_full(questions, at_least):
    of_epoch = kvasir_steps(2000, 512, questions)
    fills = [fill(pack_step(step, 8192), 8192) for step in of_epoch]
    print(f"{len(of_epoch)} steps, mean fill {mean(fills):.3f}, least {min(fills):.3f}")
    assert mean(fills) > at_least and min(fills) > 0.8


def test_packing_a_whole_validation_split_takes_few_attempts(monkeypatch):
    attempts, packs = [], packing._packs
    monkeypatch.setattr(packing, "_packs", lambda *inputs: attempts.append(inputs[1]) or packs(*inputs))
    step = [group for step in kvasir_steps(4000, 512) for group in step]
    assert fill(pack_step(step, 8192), 8192) > 0.93
    assert attempts[-1] > 500 and len(attempts) < 10
