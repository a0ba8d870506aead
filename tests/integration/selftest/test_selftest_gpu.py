"""On a GPU the self-test passes in all variants, and finds faults that only kernels and captures can show."""

from __future__ import annotations

import random

import pytest
import torch
from support.trainings import COMPILED_ON_GPU

from lookonce.selftest.attention import Heads, Layout, Lengths, attention_checks, random_layout
from lookonce.selftest.model import ModelChecks
from lookonce.selftest.report import ON_GPU, Variant
from lookonce.selftest.run import gpu_sizes, run_selftest
from lookonce.train.model import attention, packs

pytestmark = [
    *COMPILED_ON_GPU,
    pytest.mark.guarantee(
        "The self-test finds transposed block lists, wrong masks, scaled gradients and stale buffers of a captured"
        " graph, and passes where there are none."
    ),
]

DEVICE = torch.device("cuda")
LAYOUTS = (Layout((Lengths(600, (33, 20, 260), (0, 9, 19)), Lengths(129, (5,)))), random_layout(random.Random(1), 900))
BLOCK_INDICES, COPY_INTO = attention._block_indices, packs.copy_into


def wrong_results() -> list[str]:
    """The results of the attention that are not within their spread."""
    checks = attention_checks(LAYOUTS, Heads(8, 2, 64), torch.float32, "fp32", DEVICE)
    return [check.what.partition(": ")[2] for check in checks if not check.ok]


@pytest.fixture(scope="module")
def checks() -> ModelChecks:
    sizes = gpu_sizes()
    return ModelChecks(sizes.models["bf16"], sizes.questions, torch.bfloat16, "bf16", DEVICE)


def test_all_ways_are_exact():
    report = run_selftest()
    print(report.text())
    assert report.ok and report.exact == list(ON_GPU)
    assert report.seconds < 200


def test_transposed_block_lists_are_found_in_the_results(monkeypatch):
    assert wrong_results() == []
    monkeypatch.setattr(attention, "_block_indices", lambda blocks: BLOCK_INDICES(blocks.T))
    assert len(wrong_results()) == 4


def test_block_lists_that_are_not_contiguous_are_found_in_the_gradients(monkeypatch):
    def strided(blocks):
        numbers, indices = BLOCK_INDICES(blocks)
        return numbers, indices.mT.contiguous().mT

    monkeypatch.setattr(attention, "_block_indices", strided)
    assert wrong_results()


@pytest.mark.parametrize("captured", [True, False])
def test_branches_that_see_each_other_are_found(checks, monkeypatch, captured):
    def all_before(q, k, seen_until_k):
        return k <= q

    monkeypatch.setattr(attention, "attends", all_before)
    torch._dynamo.reset()  # the right mask function is compiled in
    found = checks.checks(Variant(captured=captured))
    monkeypatch.undo()
    torch._dynamo.reset()
    assert not all(check.ok for check in found)


@pytest.mark.parametrize("stale", ["input_ids", "seen_until", "pixel_values", "targets", "weights"])
def test_a_graph_that_is_replayed_with_an_old_input_is_found(checks, monkeypatch, stale):
    def forgetful(inputs, batch):
        before = inputs["weights"].clone()
        COPY_INTO(inputs, {name: tensor for name, tensor in batch.items() if name != stale or id(inputs) not in seen})
        if stale == "weights" and id(inputs) in seen:
            inputs["weights"].copy_(before)
        seen.add(id(inputs))

    seen: set[int] = set()
    monkeypatch.setattr(packs, "copy_into", forgetful)
    assert not all(check.ok for check in checks.checks(Variant()))
    assert all(check.ok for check in checks.checks(Variant(captured=False)))
