"""The trainer: gradients and the validation loss do not depend on how batches are cut; and what is measured when."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from lookonce.errors import UsageError
from lookonce.run.sections import BatchSection
from lookonce.train.data.dataset import DataCollatorForPacks, PackBatchSampler, VQADataset
from lookonce.train.data.packing import pack_step
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.trainer import Evaluations, PackTrainer, check_can_answer

VISION = SimpleNamespace(grid_thw=None, has_tower=False)  # there are no images
PROMPTER = SimpleNamespace(image_token_id=99, merge_size=2, tokenizer=SimpleNamespace(pad_token_id=0))

SLOW_S = 0.12


class Constant(torch.nn.Module):
    """Predicts the same logits everywhere."""

    model = SimpleNamespace(language_model=SimpleNamespace(layers=[SimpleNamespace()]))

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

    def forward(self, input_ids, logits_to_keep, **others):
        return SimpleNamespace(logits=self.weight.expand(len(input_ids), len(logits_to_keep), 3))


def example(answer: list[int]) -> Example:
    """A text with this answer to a question of one token."""
    supervised = np.array([False] + [True] * len(answer))
    return Example(np.array([1, *answer], np.int32), supervised, (), (), "")


class Slow(DataCollatorForPacks):
    def __call__(self, packed):
        time.sleep(SLOW_S)
        return super().__call__(packed)


@pytest.fixture(autouse=True)
def _without_attention(monkeypatch) -> None:
    """The model has no layers to set up."""
    monkeypatch.setattr("lookonce.train.model.packs.training_on_packs", lambda *_, **options: contextlib.nullcontext())


def trainer_of(make_run, folder, train, held_out=(), **batch) -> PackTrainer:
    options = {"optimizer": "sgd", "scheduler": "constant", "warmup": 0, "learning_rate": 0.1, "max_grad_norm": 0}
    arguments = training_arguments(
        make_run(train=options | {"steps": 4}), folder, eval_strategy="no", save_strategy="no"
    )
    train, held_out = (VQADataset.of(examples, PROMPTER, VISION) for examples in (train, held_out))
    sampler = PackBatchSampler.of(train, BatchSection(**batch), seed=0)
    return PackTrainer(Constant(), arguments, sampler, eval_dataset=held_out if len(held_out) else None)


ROWS = [[0], [1, 2, 0, 0], [2], [0, 0], [1]]
CUTS = [
    {"mode": "separate", "samples_per_forward": 1},
    {"mode": "separate", "samples_per_forward": 2},
    {"mode": "packed", "tokens_per_pack": 8},
    {"mode": "shared"},
]


@pytest.mark.parametrize("batch", CUTS)
def test_the_validation_loss_is_the_mean_over_tokens_however_they_are_batched(make_run, tmp_path, batch):
    examples = [example(row) for row in ROWS]
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(9, 3)
    expected = cross_entropy(logits, torch.tensor([token for row in ROWS for token in row]))
    trainer = trainer_of(make_run, tmp_path, examples, examples, **batch)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-6)


def test_a_validation_packs_its_questions_once(make_run, tmp_path):
    examples = [example(row) for row in ROWS]
    trainer = trainer_of(make_run, tmp_path, examples, examples, mode="packed", tokens_per_pack=8)
    with mock.patch("lookonce.train.data.sampler.pack_step", wraps=pack_step) as packed:
        trainer.evaluate()
    assert len(packed.call_args_list) == 1


@pytest.mark.parametrize("batch", CUTS)
def test_a_step_uses_the_gradient_of_all_its_samples_however_they_are_batched(make_run, tmp_path, batch):
    trainer = trainer_of(make_run, tmp_path, [example(row) for row in ROWS], samples_per_step=5, **batch)
    trainer.train()
    weight = torch.tensor([0.0, 1.0, 2.0], requires_grad=True)
    targets, losses = torch.tensor([token for row in ROWS for token in row]), []
    for _ in range(4):
        loss = cross_entropy(weight.expand(9, 3), targets)
        [gradient] = torch.autograd.grad(loss, weight)
        losses.append(loss.item())
        weight = (weight - 0.1 * gradient).detach().requires_grad_()
    torch.testing.assert_close(trainer.model.weight.detach(), weight.detach())
    assert [log["loss"] for log in trainer.state.log_history if "loss" in log] == pytest.approx(losses, rel=1e-4)


def test_the_waiting_time_is_measured(make_run, tmp_path, monkeypatch):
    batch = {"mode": "separate", "samples_per_step": 4, "samples_per_forward": 2}
    monkeypatch.setattr("lookonce.train.loop.trainer.DataCollatorForPacks", Slow)
    trainer = trainer_of(make_run, tmp_path, [example([0])] * 16, **batch)
    trainer.train()
    trainer.stop_prefetch()
    assert 0.25 * 8 * SLOW_S < trainer.wait_seconds  # some batches are made while steps run, most on a busy machine


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (None, "out of memory on this GPU of 80.0 GB; lower batch.tokens_per_pack (now 500) or set"),
        (480, "out of memory: a pack of 480 tokens does not fit this GPU of 80.0 GB; lower batch.tokens_per_pack"),
    ],
)
def test_out_of_memory_is_named_with_the_key_to_lower_and_what_fits(
    make_run, tmp_path, monkeypatch, num_tokens, expected
):
    gpu = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    trainer = trainer_of(make_run, tmp_path, [example([0])], tokens_per_pack=500)
    trainer.memory_hint = "; 128 tokens fit"
    said = trainer.out_of_memory(num_tokens)
    assert said.startswith(expected) and said.endswith("gradient_checkpointing: selective, or true; 128 tokens fit")


LAST = 10
MODEL = torch.nn.Linear(1, 1)
MODEL.device = torch.device("cpu")


def answer(model):
    return {"exact_match": 0.25, "num_questions": 4}


def due(every, answer=answer, validated=()):
    """The steps after which the validation loss and answers are measured, in epochs of 4 steps."""
    evaluations, found = Evaluations(every, answer), []
    for step in range(1, LAST + 1):
        state = SimpleNamespace(global_step=step, max_steps=LAST, epoch=step / 4)
        control = SimpleNamespace(should_evaluate=step in validated)
        evaluations.on_step_end(None, state, control)
        if control.should_evaluate:
            found.append((step, evaluations.validates, evaluations.answers))
        control.should_evaluate = step == 4 and 4 not in validated  # as Trainer at the end of an epoch
        evaluations.on_epoch_end(None, state, control)
        if control.should_evaluate:
            found.append((step, evaluations.validates, evaluations.answers))
    return found


def test_answers_are_due_after_some_steps_or_each_epoch_and_after_the_last_step():
    assert [step for step, _, answers in due(3) if answers] == [3, 6, 9, 10]
    assert [step for step, _, answers in due("epoch") if answers] == [4, 8, 10]


def test_the_validation_loss_is_measured_when_trainer_says():
    plain = [step for step, validates, _ in due(None, None, (5, 6)) if validates]
    assert plain == [step for step, validates, _ in due(3, answer, (5, 6)) if validates] == [4, 5, 6]
    assert (6, True, True) in due(3, answer, (5, 6))


def test_what_answers_score_is_logged_and_the_random_state_stays():
    def random_answer(model):
        torch.rand(3)
        return answer(model)

    before = torch.get_rng_state()
    found = Evaluations(1, random_answer).score(MODEL)
    assert found.pop("eval_seconds") >= 0 and found == {"eval_exact_match": 0.25, "eval_num_questions": 4}
    assert torch.equal(torch.get_rng_state(), before)


def test_sharded_weights_are_refused_with_what_to_set(make_run):
    run = make_run(train={"fsdp": True}, eval={"every": 2})
    with pytest.raises(UsageError, match=r"eval.every cannot .* train.fsdp: false .* eval.every: null .*lookonce eval"):
        check_can_answer(run, num_ranks=2)
    check_can_answer(run, num_ranks=1)
    check_can_answer(make_run(train={"fsdp": True}), num_ranks=2)
