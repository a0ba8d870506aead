"""The loss: sum over supervised tokens by their number in the whole optimizer step."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from lookonce.errors import UsageError
from lookonce.train.batch import IGNORED
from lookonce.train.trainer import RunTrainer, token_mean_loss, training_arguments


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


def test_several_processes_are_refused(make_run, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="several processes is not supported yet"):
        training_arguments(make_run(), tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fp16 is fine on a GPU")
def test_fp16_without_a_gpu_is_refused(make_run, tmp_path):
    with pytest.raises(UsageError, match="fp16 needs a GPU"):
        training_arguments(make_run(train={"precision": "fp16"}), tmp_path)


@pytest.mark.parametrize("key", ["scheduler", "optimizer"])
def test_a_name_that_trainer_does_not_know_is_refused(make_run, tmp_path, key):
    with pytest.raises(UsageError, match="`train` section"):
        training_arguments(make_run(train={key: "no such thing"}), tmp_path)


class Constant(torch.nn.Module):
    """Predicts the same logits everywhere; `input_ids` has one column for each kept one."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

    def forward(self, input_ids):
        return outputs(self.weight.expand(*input_ids.shape, 3))


def trainer_of(make_run, folder, collator, train, held_out=(), **batch) -> RunTrainer:
    options = {"eval_strategy": "no", "save_strategy": "no"}
    return RunTrainer(
        Constant(), training_arguments(make_run(batch=batch), folder, **options), collator, train, held_out
    )


def labels_of(rows):
    """Rows of labels of different lengths, padded with ignored ones."""
    length = 1 + max(len(row) for row in rows)
    labels = torch.tensor([[IGNORED, *row] + [IGNORED] * (length - 1 - len(row)) for row in rows])
    return {"input_ids": labels[:, 1:], "labels": labels}


def test_the_validation_loss_is_the_mean_over_tokens_however_they_are_batched(make_run, tmp_path):
    rows = [[0], [1, 2, 0, 0], [2], [0, 0], [1]]
    expected = torch.nn.functional.cross_entropy(
        torch.tensor([0.0, 1.0, 2.0]).expand(9, 3), torch.tensor([label for row in rows for label in row])
    )
    for size in (1, 2, 4):
        batch = {"samples_per_forward": size, "samples_per_step": 4}
        metrics = trainer_of(make_run, tmp_path, labels_of, rows, rows, **batch).evaluate()
        assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-6)


def test_the_waiting_time_is_measured(make_run, tmp_path):
    def slowly(rows):
        time.sleep(0.05)
        return labels_of(rows)

    trainer = trainer_of(make_run, tmp_path, slowly, [[0]] * 32)
    trainer.train()
    assert trainer.wait_seconds >= 4 * 0.05
