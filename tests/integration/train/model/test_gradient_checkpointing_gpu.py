"""On a GPU, compiled layers with gradient checkpointing are as exact as without, are captured, and need less memory."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
import torch
from support.batches import Replays, flat, packs_of
from support.trainings import COMPILED_ON_GPU

from lookonce.run.sections import Checkpointing
from lookonce.selftest.model import MERGE_SIZE, Heads, ModelSize, Outcome, Passes, Questions, small_model
from lookonce.train.model.compile import checkpointed
from lookonce.train.model.packs import packed_attention

pytestmark = COMPILED_ON_GPU

DEVICE = torch.device("cuda")
SIZE = ModelSize(512, 8, Heads(8, 4, 64))
QUESTIONS = Questions(((3, 4), (30, 40), (2, 9), (20, 30)), (2, 9, 4, 9, 3), 2048, 12)
STEP = 0.01
"""How far weights are shifted, as a norm: rounding and curvature are both small there."""
HOW: tuple[Checkpointing, ...] = ("selective", True)


@cache
def packs() -> list[dict[str, Any]]:
    return packs_of(QUESTIONS, SIZE.hidden, DEVICE)


def passes(dtype: torch.dtype, dropout: float = 0.0) -> Passes:
    model = small_model(SIZE, dtype, DEVICE)
    for module in model.modules() if dropout else ():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(dropout)
    return Passes(model, dtype, DEVICE)


def outcomes(passes: Passes, how: Checkpointing) -> list[Outcome]:
    """Each pack's outcome, with dropout from the same random state."""
    with packed_attention(passes.model, compiled=True), checkpointed(passes.model, how):
        passes.outcome(packs())  # compiles
        torch.cuda.manual_seed(1)
        return [passes.outcome([pack]) for pack in packs()]


@pytest.mark.parametrize(("how", "dropout"), [("selective", 0.0), (True, 0.0), ("selective", 0.3)])
def test_in_float32_nothing_changes(how, dropout):
    exact = passes(torch.float32, dropout)
    for found, expected in zip(outcomes(exact, how), outcomes(exact, False), strict=True):
        loss, gradient = found.distance(expected)
        print(f"{how} {dropout}: loss {loss:.1e}, gradient {gradient:.1e}")
        assert loss < 1e-5 and gradient < 1e-4


@pytest.mark.guarantee(
    "With dropout, a compiled layer that is checkpointed as a whole draws other random numbers, and its "
    "gradients are those of its loss."
)
@pytest.mark.parametrize("how", [False, *HOW])
def test_with_dropout_the_gradient_is_that_of_the_loss(how):
    """By finite differences: the graph of a whole layer that is checkpointed draws other random numbers than without.

    The same random state gives the same numbers again, so the loss at shifted weights is the same function.
    """
    exact = passes(torch.float32, dropout=0.3)
    [pack, *_] = packs()

    def outcome(shift: float, along: dict[str, torch.Tensor] | None = None) -> Outcome:
        for name, weight in exact.model.named_parameters():
            if along and name in along:
                weight.data.add_(along[name].to(weight.device), alpha=shift)
        torch.cuda.manual_seed(1)
        return exact.outcome([pack])

    with packed_attention(exact.model, compiled=True), checkpointed(exact.model, how):
        exact.outcome([pack])  # compiles
        first, again = outcome(0), outcome(0)
        assert torch.equal(first.loss, again.loss)
        norm = sum(float(gradient.square().sum()) for gradient in first.gradients.values()) ** 0.5
        unit = {name: gradient / norm for name, gradient in first.gradients.items()}
        higher, lower = outcome(STEP, unit), outcome(-2 * STEP, unit)
    slope = float(higher.loss - lower.loss) / (2 * STEP)
    print(f"{how}: slope {slope:.4f} along a gradient of {norm:.4f}")
    assert slope == pytest.approx(norm, rel=0.02)


@pytest.mark.parametrize("how", HOW)
def test_in_bfloat16_it_is_as_near_to_float32_as_without(how):
    exact, rounded = outcomes(passes(torch.float32), False), passes(torch.bfloat16)

    def distances(choice: Checkpointing) -> list[float]:
        """The mean distances of loss and gradient."""
        each = [one.distance(other) for one, other in zip(outcomes(rounded, choice), exact, strict=True)]
        return [mean(values) for values in zip(*each, strict=True)]

    found, without = distances(how), distances(False)
    print(f"{how}: loss and gradient {found}, without {without}")
    assert all(one <= 1.5 * other for one, other in zip(found, without, strict=True))


@pytest.mark.parametrize("how", HOW)
def test_replayed_passes_have_the_bits_of_launched_ones(how):
    rounded = passes(torch.bfloat16)
    replays = Replays(rounded, MERGE_SIZE, QUESTIONS.tokens_per_pack)
    with packed_attention(rounded.model, compiled=True), checkpointed(rounded.model, how):
        for pack in packs():
            launched, replayed = replays.launched(pack), replays.replayed(pack)
            assert torch.equal(replayed.loss, launched.loss)
            assert all(map(torch.equal, replayed.gradients.values(), launched.gradients.values()))


@pytest.mark.parametrize("how", HOW)
def test_replayed_passes_draw_new_dropout_and_the_same_from_the_same_random_state(how):
    rounded = passes(torch.bfloat16, dropout=0.3)
    replays = Replays(rounded, MERGE_SIZE, QUESTIONS.tokens_per_pack)
    [pack, *_] = packs()
    with packed_attention(rounded.model, compiled=True), checkpointed(rounded.model, how):
        replays.launched(pack)
        replays.replayed(pack)
        torch.cuda.manual_seed(1)
        first, second = (flat(replays.replayed(pack)) for _ in range(2))
        torch.cuda.manual_seed(1)
        again = flat(replays.replayed(pack))
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_the_more_is_computed_again_the_less_memory_a_pass_needs():
    longest = max(packs(), key=lambda pack: pack["input_ids"].shape[1])
    peaks = {}
    for how in (False, *HOW):
        rounded = passes(torch.bfloat16)
        with packed_attention(rounded.model, compiled=True), checkpointed(rounded.model, how):
            rounded.outcome([longest])
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            rounded.run(longest)
            peaks[how] = torch.cuda.max_memory_allocated() - before
    print({how: f"{peak / 2**20:.0f} MiB" for how, peak in peaks.items()})
    assert all(less < 0.8 * more for more, less in pairwise(peaks.values()))
