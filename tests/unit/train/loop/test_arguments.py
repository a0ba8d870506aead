"""Trainer's settings: what cannot work is refused before anything is read."""

from __future__ import annotations

import pytest
import torch

from lookonce.errors import UsageError
from lookonce.train.loop.arguments import training_arguments


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp16 is fine on a GPU")
def test_fp16_without_a_gpu_is_refused(make_run, tmp_path):
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        training_arguments(make_run(train={"precision": "fp16"}), tmp_path)


@pytest.mark.parametrize(
    ("key", "message"),
    [("optimizer", "`train` section is not valid"), ("scheduler", "`train.scheduler` 'no such thing' is unknown")],
)
def test_a_name_that_trainer_does_not_know_is_refused(make_run, tmp_path, key, message):
    with pytest.raises(UsageError, match=message):
        training_arguments(make_run(train={key: "no such thing"}), tmp_path)
