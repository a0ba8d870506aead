"""Captured passes add up gradients as launched ones do, and a pass that cannot be captured names the first error."""

from __future__ import annotations

import pytest
import torch

from lookonce.errors import TrainingError, UsageError
from lookonce.train.data.batches import Batch
from lookonce.train.model.packs import CapturedPasses, Replay

NAMES = ("input_ids", "position_ids", "seen_until", "logits_to_keep", "targets", "weights")
BATCH: Batch = {name: torch.zeros(1, 4) for name in NAMES}


def captured(*errors: Exception) -> CapturedPasses:
    """Passes whose capture fails: the pass with the first error, and ending the capture with the second, if any."""

    def capture(function: Replay) -> Replay:
        try:
            raise errors[0]
        finally:
            for error in errors[1:]:
                raise error

    return CapturedPasses(lambda batch: torch.zeros(()), [], 2, lambda: capture)


@pytest.mark.parametrize("later", [(), (RuntimeError("failed due to a previous error"),)])
def test_the_first_error_is_named(later):
    with pytest.raises(TrainingError, match=r"\(kernel needs a sync\); train without CUDA graphs: lookonce train"):
        captured(RuntimeError("kernel needs a sync\nmore"), *later)(BATCH)


@pytest.mark.parametrize("later", [(), (RuntimeError("failed due to a previous error"),)])
def test_out_of_memory_stays_that(later):
    with pytest.raises(torch.OutOfMemoryError):
        captured(torch.OutOfMemoryError(), *later)(BATCH)


def test_a_longer_pass_is_captured_before_all_others():
    """Memory of CUDA graphs is shared if the longest is first."""
    lengths: list[int] = []

    def capture(function: Replay) -> Replay:
        function()
        return function

    def forward(batch: Batch) -> torch.Tensor:
        lengths.append(batch["input_ids"].shape[1])
        return weight.sum()

    weight = torch.nn.Parameter(torch.ones(1))
    passes = CapturedPasses(forward, [weight], 2, lambda: capture)
    for length, captured_lengths in ((256, [256]), (128, [128]), (512, [512]), (512, []), (256, [256]), (128, [128])):
        lengths.clear()
        passes.prepare((length, 64, False), BATCH)
        assert lengths == captured_lengths


@pytest.mark.guarantee("Captured passes accumulate the gradients of a step as launched passes do.")
def test_passes_add_to_the_gradients_of_their_step():
    """A weight that no pass of the step uses has no gradient; those of the step before are gone."""
    used, sometimes = (torch.nn.Parameter(torch.tensor([value])) for value in (2.0, 3.0))
    numbers: list[float] = []

    def forward(batch: Batch) -> torch.Tensor:
        number = batch["targets"].sum()
        return (used * number + (sometimes * number**2 if numbers[-1] > 1 else 0)).sum()

    for step, expected in (((1, 2), (3, 4)), ((1,), (1, None)), ((3, 1, 2), (6, 13))):
        passes = CapturedPasses(forward, [used, sometimes], 2, lambda: lambda function: function)
        used.grad = sometimes.grad = None
        for number in step:
            numbers.append(number)
            loss = passes(BATCH | {"targets": torch.tensor([[float(number), 0, 0, 0]])})
            assert loss == 2 * number + (3 * number**2 if number > 1 else 0)
            loss.backward()
        assert (used.grad, sometimes.grad) == expected


def test_the_gradient_of_a_loss_scales_with_that_of_what_is_made_of_it_and_is_there_once_until_the_next_pass():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    passes = CapturedPasses(lambda batch: (weight**2).sum(), [weight], 2, lambda: lambda function: function)
    (3 * passes(BATCH)).backward()
    assert weight.grad == 12
    loss = passes(BATCH)
    passes(BATCH)
    with pytest.raises(UsageError, match="call backward once for each loss of pack_loss, before the next"):
        loss.backward()
    loss = passes(BATCH)
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="once they are used"):
        loss.backward()
