"""The message about a pass that cannot be captured names the error that ended the capture, not those that follow."""

from __future__ import annotations

import pytest
import torch

from lookonce.errors import TrainingError
from lookonce.train.data.features import Batch
from lookonce.train.model.cuda_graphs import CapturedPasses, Replay

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

    return CapturedPasses(lambda batch: torch.zeros(()), [], 2, capture)


@pytest.mark.parametrize("later", [(), (RuntimeError("failed due to a previous error"),)])
def test_the_first_error_is_named(later):
    with pytest.raises(TrainingError, match=r"\(kernel needs a sync\); train without CUDA graphs: lookonce train"):
        captured(RuntimeError("kernel needs a sync\nmore"), *later)(BATCH)


@pytest.mark.parametrize("later", [(), (RuntimeError("failed due to a previous error"),)])
def test_out_of_memory_stays_that(later):
    with pytest.raises(torch.OutOfMemoryError):
        captured(torch.OutOfMemoryError(), *later)(BATCH)
