"""What is measured while training: answers are due beside the validation loss, which stays where it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lookonce.errors import UsageError
from lookonce.train.loop.trainer import Evaluations, check_can_answer

LAST = 10
MODEL = torch.nn.Linear(1, 1)
MODEL.device = torch.device("cpu")


def answer(model):
    return {"right": 1, "questions": 4}


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


def test_the_exact_match_is_that_of_all_ranks_and_the_random_state_stays():
    def random_answer(model):
        torch.rand(3)
        return answer(model)

    before = torch.get_rng_state()
    found = Evaluations(1, random_answer).exact_match(MODEL, lambda numbers: numbers * 2)
    assert (found["eval_exact_match"], found["eval_num_questions"]) == (0.25, 8) and found["eval_seconds"] >= 0
    assert torch.equal(torch.get_rng_state(), before)


def test_sharded_weights_are_refused_with_what_to_set(make_run):
    run = make_run(train={"fsdp": True}, eval={"every": 2})
    with pytest.raises(UsageError, match=r"eval.every cannot .* train.fsdp: false .* eval.every: null .*lookonce eval"):
        check_can_answer(run, num_ranks=2)
    check_can_answer(run, num_ranks=1)
    check_can_answer(make_run(train={"fsdp": True}), num_ranks=2)
