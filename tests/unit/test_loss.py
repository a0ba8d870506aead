"""The loss: sum over supervised tokens by their number in the whole optimizer step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lookonce.errors import UsageError
from lookonce.train.batch import IGNORED
from lookonce.train.trainer import RunTrainer, accumulation_steps, token_mean_loss, training_arguments


def outputs(logits: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(logits=logits)


def test_the_loss_equals_that_of_shifted_labels_over_all_positions():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 11, generator=generator)
    input_ids = torch.randint(0, 11, (3, 8), generator=generator)
    supervised = torch.rand(3, 8, generator=generator) < 0.4
    full = torch.where(supervised, input_ids, IGNORED)[:, 1:]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), full.flatten(), ignore_index=IGNORED)
    columns = (full != IGNORED).any(dim=0).nonzero().flatten()
    labels = torch.cat([torch.full((3, 1), IGNORED), full[:, columns]], dim=1)
    torch.testing.assert_close(token_mean_loss(outputs(logits[:, columns]), labels), expected)


def test_the_loss_is_divided_by_the_tokens_of_the_whole_step():
    logits, labels = torch.zeros(1, 2, 5), torch.tensor([[IGNORED, 1, 2]])
    alone = token_mean_loss(outputs(logits), labels)
    torch.testing.assert_close(token_mean_loss(outputs(logits), labels, torch.tensor(8)), alone * 2 / 8)


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(1, 3000, 7).bfloat16()
    labels = torch.ones(1, 3001, dtype=torch.long)
    assert token_mean_loss(outputs(logits), labels).dtype == torch.float32


@pytest.mark.parametrize(("step", "forward", "ranks", "expected"), [(8, 8, 1, 1), (16, 4, 1, 4), (16, 4, 2, 2)])
def test_accumulation_follows_from_the_batch_sizes(make_run, monkeypatch, step, forward, ranks, expected):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    run = make_run(batch={"samples_per_step": step, "samples_per_forward": forward})
    assert accumulation_steps(run) == expected


def test_batch_sizes_that_do_not_divide_are_refused(make_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = make_run(batch={"samples_per_step": 6, "samples_per_forward": 2})
    with pytest.raises(UsageError, match=r"samples_per_step \(6\) must be a multiple of .* \(2\) .* ranks \(2\)"):
        accumulation_steps(run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp16 is fine on a GPU")
def test_fp16_without_a_gpu_is_refused(make_run, tmp_path):
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        training_arguments(make_run(train={"precision": "fp16"}), tmp_path)


@pytest.mark.parametrize("key", ["scheduler", "optimizer"])
def test_a_name_that_trainer_does_not_know_is_refused(make_run, tmp_path, key):
    with pytest.raises(UsageError, match="`train` section"):
        training_arguments(make_run(train={key: "no such thing"}), tmp_path)


def test_the_waiting_time_is_measured(make_run, tmp_path):
    import time

    class SlowCollator:
        def __call__(self, examples):
            time.sleep(0.05)
            return {"input_ids": torch.zeros(1, 1), "labels": torch.tensor([[IGNORED, 0]])}

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, 1, 2))

        def forward(self, input_ids):
            return outputs(self.weight)

    arguments = training_arguments(
        make_run(train={"steps": 4}), tmp_path, eval_strategy="no", save_strategy="no", load_best_model_at_end=False
    )
    trainer = RunTrainer(Model(), arguments, SlowCollator(), [0] * 32)
    trainer.train()
    assert trainer.wait_seconds >= 4 * 0.05
