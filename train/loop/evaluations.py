"""What is measured while training, and after which steps: the validation loss, and the exact match of answers.

Design: Trainer decides when the validation loss is due, and this callback when answers are. Both are measured in
Trainer's evaluation, which comes before a checkpoint that is due at the same step, so a resumed training lacks no
measurement. Answering changes neither the weights nor the random state, so a training has the same numbers with and
without it. It costs the time in which the questions are answered, which is logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from lookonce.errors import UsageError
from lookonce.run.config import RunFile

Answer = Callable[[Any], dict[str, float]]
"""Lets a model answer this rank's share of the questions; returns the numbers `right` and `questions`."""


class Evaluations(TrainerCallback):
    """Asks Trainer for an evaluation when answers are due, and says what the evaluation measures.

    It must come before callbacks that stop a training, because what is due is measured first.
    """

    def __init__(self, every: int | Literal["epoch"] | None = None, answer: Answer | None = None) -> None:
        """Answers are due after `every` epoch or number of steps, and after the last step."""
        self._every, self._answer = every, answer
        self.validates, self.answers = True, False
        """What the next evaluation measures: the validation loss, and the exact match."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(control, self._answer is not None and self._is_due(state))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(control, False)  # the epoch's last step has ended before

    def _is_due(self, state: Any) -> bool:
        if state.global_step >= state.max_steps:
            return True
        return bool(state.epoch.is_integer() if self._every == "epoch" else state.global_step % self._every == 0)

    def _note(self, control: Any, answers: bool) -> None:
        self.validates, self.answers = control.should_evaluate, answers
        control.should_evaluate = control.should_evaluate or answers

    def exact_match(self, model: Any, add_up: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """The exact match of a model's answers, over all ranks; `add_up` gives the sums of all ranks' numbers."""
        assert self._answer
        began = time.perf_counter()
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            counted = self._answer(model)
        right, questions = add_up(torch.tensor([counted["right"], counted["questions"]])).tolist()
        seconds = round(time.perf_counter() - began, 3)
        return {"eval_exact_match": right / questions, "eval_num_questions": questions, "eval_seconds": seconds}


def check_can_answer(run: RunFile, num_ranks: int) -> None:
    """Check that a training can answer questions, if it is asked to.

    Raises:
        UsageError: its weights are sharded, so no rank has all of them.
    """
    if run.eval.every and run.train.fsdp and num_ranks > 1:
        raise UsageError(
            "eval.every cannot answer questions with weights that train.fsdp shards over several ranks; set "
            "train.fsdp: false if the model fits on one GPU, or eval.every: null and run after training: lookonce eval "
            f"{run.output}"
        )
