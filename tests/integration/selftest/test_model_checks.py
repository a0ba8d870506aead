"""The self-test finds each known fault of packs: in masks, positions, losses, gradients and captured buffers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.batches import packs_of

from lookonce.selftest.attention import Heads
from lookonce.selftest.model import ModelChecks, ModelSize, Questions
from lookonce.selftest.report import ON_CPU
from lookonce.selftest.run import cpu_sizes, gpu_sizes
from lookonce.train.data import batches
from lookonce.train.model import attention, loss, packs
from lookonce.train.model.packs import FEATURES, GRIDS, CapturedPasses, shape_of_batch

pytestmark = pytest.mark.guarantee(
    "The self-test finds transposed block lists, wrong masks, scaled gradients and stale buffers of a captured"
    " graph, and passes where there are none."
)

CPU = torch.device("cpu")
QUESTIONS = Questions(((3, 4), (6, 5), (2, 3)), (4, 3, 2, 2), 300, 4)
REPLAYED, LAUNCHED = ON_CPU
copy_into, dense_mask, weighted_loss = packs.copy_into, attention.dense_mask, loss.weighted_loss


@pytest.fixture(scope="module")
def small() -> ModelChecks:
    return ModelChecks(ModelSize(64, 3, Heads(4, 2, 16)), QUESTIONS, torch.float32, "fp32", CPU)


def passed(checks: ModelChecks, variant=LAUNCHED) -> list[bool]:
    """Whether loss and gradient are within their spread."""
    return [check.ok for check in checks.checks(variant)]


@pytest.mark.parametrize("variant", ON_CPU, ids=lambda variant: variant.name)
def test_what_is_right_passes(small, variant):
    assert passed(small, variant) == [True, True]


@pytest.mark.parametrize("sizes", [gpu_sizes(), cpu_sizes()], ids=["GPU", "CPU"])
def test_several_packs_have_one_shape_so_that_buffers_are_used_again(sizes):
    packs = packs_of(sizes.questions, 8)
    assert Counter(map(shape_of_batch, packs)).most_common(1)[0][1] >= 3
    assert all(FEATURES in pack for pack in packs)


def test_branches_that_see_each_other_are_found(small, monkeypatch):
    monkeypatch.setattr(attention, "dense_mask", lambda seen_until: dense_mask(seen_until.cummax(0).values))
    assert passed(small) == [False, False]


def test_a_mask_that_is_off_by_one_where_a_prefix_ends_is_found(small, monkeypatch):
    def shorter(seen_until: torch.Tensor) -> torch.Tensor:
        """The last token of a prefix counts as one of the branch that follows."""
        following = torch.cat([seen_until[1:], seen_until[-1:]])
        return dense_mask(torch.where(following < seen_until, following, seen_until))

    monkeypatch.setattr(attention, "dense_mask", shorter)
    assert passed(small)[1] is False


def test_a_scaled_gradient_is_found_by_a_thousandth(small, monkeypatch):
    def scaled(*tensors: torch.Tensor) -> torch.Tensor:
        right = weighted_loss(*tensors)
        return right + 1e-3 * (right - right.detach())

    monkeypatch.setattr(loss, "weighted_loss", scaled)
    assert passed(small) == [True, False]


def test_wrong_positions_are_found(small, monkeypatch):
    def shifted(*arguments):
        positions, start = prefix_positions(*arguments)
        return positions, start + 1

    prefix_positions = batches.prefix_positions
    monkeypatch.setattr(batches, "prefix_positions", shifted)
    assert passed(small)[1] is False


BUFFERS = [
    *("input_ids", "position_ids", "seen_until"),
    *("logits_to_keep", "targets", "weights", FEATURES),
]


@pytest.mark.parametrize("stale", BUFFERS)
def test_a_replay_with_an_old_input_is_found(small, monkeypatch, stale):
    """Everything is copied when a buffer is new, and this one tensor never again."""
    seen = set()

    def forgetful(inputs, batch):
        kept = {stale} if id(inputs) in seen else set()
        before = inputs["weights"].clone()
        copy_into(inputs, {name: tensor for name, tensor in batch.items() if name not in kept})
        if stale == "weights" and kept:
            inputs["weights"].copy_(before)
        seen.add(id(inputs))

    monkeypatch.setattr(packs, "copy_into", forgetful)
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


def test_gradients_of_an_earlier_pass_are_found(small, monkeypatch):
    add_gradients = CapturedPasses.add_gradients

    def twice(self, number, times):
        add_gradients(self, number, times)
        for weight, gradient in zip(self._trained, self._gradients, strict=True):
            weight.grad += gradient

    monkeypatch.setattr(CapturedPasses, "add_gradients", twice)
    assert passed(small, REPLAYED) == [True, False]


def test_a_replay_that_returns_its_first_result_is_found(small, monkeypatch):
    def once(function):
        first = function()
        return lambda: first

    monkeypatch.setattr(packs, "run_again", once)
    assert False in passed(small, REPLAYED)


def test_a_way_that_cannot_be_computed_is_a_mismatch_with_its_error(small, monkeypatch):
    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(packs, "run_again", refuse)
    [check] = small.checks(REPLAYED)
    assert not check.ok and "TrainingError: a pass over a pack cannot be captured" in check.error
    assert check.to_json()["difference"] is None
