"""On a GPU the self-test passes in all variants, and finds faults that only kernels and captures can show."""

from __future__ import annotations

import pytest
import torch
from support.planted import an_old_input
from support.trainings import COMPILED_ON_GPU

from lookonce.selftest.model import ModelChecks, gpu_sizes, run_selftest
from lookonce.selftest.report import ON_GPU, Variant
from lookonce.train.model import attention

pytestmark = [
    *COMPILED_ON_GPU,
    pytest.mark.guarantee(
        "The self-test finds transposed block lists, wrong masks, scaled gradients and stale buffers of a captured"
        " graph, and passes where there are none."
    ),
]

BLOCK_INDICES = attention._block_indices


@pytest.fixture(scope="module")
def checks() -> ModelChecks:
    questions, models = gpu_sizes()
    return ModelChecks(models["bf16"], questions, torch.bfloat16, "bf16", torch.device("cuda"))


@pytest.fixture(scope="module")
def exact() -> ModelChecks:
    questions, models = gpu_sizes()
    return ModelChecks(models["fp32"], questions, torch.float32, "fp32", torch.device("cuda"))


def wrong_results(exact: ModelChecks) -> list[str]:
    """The results of the attention that are not within their spread."""
    return [check.what.partition(": ")[2] for check in exact.attention() if not check.ok]


def test_all_ways_are_exact():
    report = run_selftest()
    print(report.text())
    assert report.ok and report.exact == list(ON_GPU)
    assert report.seconds < 200


def test_transposed_block_lists_are_found_in_the_results(exact, monkeypatch):
    assert wrong_results(exact) == []
    monkeypatch.setattr(attention, "_block_indices", lambda blocks: BLOCK_INDICES(blocks.T))
    assert len(wrong_results(exact)) == 4


def test_block_lists_that_are_not_contiguous_are_found_in_the_gradients(exact, monkeypatch):
    def strided(blocks):
        numbers, indices = BLOCK_INDICES(blocks)
        return numbers, indices.mT.contiguous().mT

    monkeypatch.setattr(attention, "_block_indices", strided)
    assert wrong_results(exact)


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
    an_old_input(stale, monkeypatch)
    assert not all(check.ok for check in checks.checks(Variant()))
    assert all(check.ok for check in checks.checks(Variant(captured=False)))
