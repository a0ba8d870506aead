"""The self-test finds each known fault of packs: in masks, positions, losses, gradients and captured buffers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.batches import packs_of
from support.planted import IN_ALL, IN_REPLAYS

from lookonce.selftest.model import Heads, ModelChecks, ModelSize, Questions, cpu_sizes, gpu_sizes
from lookonce.selftest.report import ON_CPU
from lookonce.train.model import packs
from lookonce.train.model.packs import FEATURES, GRIDS, shape_of_batch

pytestmark = pytest.mark.guarantee(
    "The self-test finds transposed block lists, wrong masks, scaled gradients and stale buffers of a captured"
    " graph, and passes where there are none."
)

QUESTIONS = Questions(((3, 4), (6, 5), (2, 3)), (4, 3, 2, 2), 300, 4)
REPLAYED, LAUNCHED = ON_CPU


@pytest.fixture(scope="module")
def small() -> ModelChecks:
    return ModelChecks(ModelSize(64, 3, Heads(4, 2, 16)), QUESTIONS, torch.float32, "fp32", torch.device("cpu"))


def passed(checks: ModelChecks, variant=LAUNCHED) -> list[bool]:
    """Whether loss and gradient are within their spread."""
    return [check.ok for check in checks.checks(variant)]


@pytest.mark.guarantee("Data that another pack left in the buffers of a CUDA graph have no effect.")
@pytest.mark.parametrize("variant", ON_CPU, ids=lambda variant: variant.name)
def test_what_is_right_passes(small, variant):
    assert passed(small, variant) == [True, True]
    assert all(check.ok for check in (*small.masks(), *small.attention()))


@pytest.mark.parametrize("sizes", [gpu_sizes(), cpu_sizes()], ids=["GPU", "CPU"])
def test_several_packs_have_one_shape_so_that_buffers_are_used_again(sizes):
    packs = packs_of(sizes[0], 8)
    assert Counter(map(shape_of_batch, packs)).most_common(1)[0][1] >= 3
    assert all(FEATURES in pack for pack in packs)


@pytest.mark.parametrize("name", IN_ALL)
def test_a_fault_is_found(small, monkeypatch, name):
    IN_ALL[name](monkeypatch)
    assert passed(small)[1] is False


@pytest.mark.parametrize("name", IN_REPLAYS)
def test_a_fault_of_replays_is_found(small, monkeypatch, name):
    IN_REPLAYS[name](monkeypatch)
    assert False in passed(small, REPLAYED)


def test_launched_passes_have_no_buffers(small, monkeypatch):
    monkeypatch.setattr(packs, "copy_into", lambda inputs, batch: pytest.fail("a buffer was used"))
    assert passed(small, LAUNCHED) == [True, True]


def test_targets_that_an_earlier_pack_left_are_found(small, monkeypatch):
    def without_clearing(inputs, batch):
        for name, tensor in batch.items():
            if name != GRIDS:
                inputs[name][tuple(slice(size) for size in tensor.shape)].copy_(tensor)

    monkeypatch.setattr(packs, "copy_into", without_clearing)
    assert passed(small, REPLAYED) == [False, False]


def test_a_way_that_cannot_be_computed_is_a_mismatch_with_its_error(small, monkeypatch):
    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(packs, "run_again", refuse)
    [check] = small.checks(REPLAYED)
    assert not check.ok and "TrainingError: a pass over a pack cannot be captured" in check.error
    assert check.to_json()["difference"] is None
