"""What a training by rewards learns from: answers that its model draws to questions, and what they are worth.

The engine of evaluations draws them: each image is computed once for all its questions, each question once for all its
answers. It keeps its buffers and captured passes from step to step, because weights change in place. If memory allows,
a batch has the tokens of a whole draw. Each rank draws and rewards its share of the questions, and gets all answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lookonce.eval.answers.engines import SharedPrefixes, tokens_beside_training, with_batches
from lookonce.eval.answers.questions import Question, row_of
from lookonce.eval.decoding.dialogue import Sample
from lookonce.eval.decoding.sampling import Sampling
from lookonce.eval.scores.reward import Reward
from lookonce.run.open import OpenRun
from lookonce.train.data.policy import Drawn
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.distributed import ALONE, Ranks
from lookonce.train.model.compile import as_loaded


class Policy:
    """Draws answers to the training questions of a run, and rewards them."""

    def __init__(self, opened: OpenRun, questions: Sequence[Question], ranks: Ranks = ALONE) -> None:
        """Answers to `questions`, which `__call__` names by their numbers.

        Raises:
            UsageError: a reward is a function that cannot be imported, or has another form.
        """
        self._opened, self._questions, self._ranks = opened, questions, ranks
        self._options = opened.run.grpo
        self._reward = Reward(self._options)
        self._engine: SharedPrefixes | None = None
        self._modules: list[Any] = []
        """Those of the model, which is the first."""
        self.tokens_per_batch = opened.run.eval.tokens_per_batch
        self.sampling_seconds = self.rewarding_seconds = 0.0

    def __call__(self, model: Any, asked: Sequence[tuple[int, Example]], seed: int) -> list[list[Drawn]]:
        """The answers to each question, of all ranks.

        Raises:
            UsageError: a reward of the user's own failed; names the record.
            TrainingError: the GPU is out of memory for one question.
        """
        began, (rank, num_ranks) = time.perf_counter(), (self._ranks.rank, self._ranks.num_ranks)
        share = asked[len(asked) * rank // num_ranks : len(asked) * (rank + 1) // num_ranks]
        engine = self._engine = self._engine or self._engine_of(model, asked)
        with as_loaded(model, self._opened.run.model.attention), self._evaluating(model):
            samples = engine.samples(model, [prompt for _, prompt in share], seed, self._opened.notify) if share else []
        drawn = time.perf_counter()
        self.sampling_seconds += drawn - began
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # puts back what a function of the user's own sets
            mine = [self._rewarded(*question, group) for question, group in zip(share, samples, strict=True)]
        self.rewarding_seconds += time.perf_counter() - drawn
        return [group for of_rank in self._ranks.gather_for_all(mine) for group in of_rank]

    @contextlib.contextmanager
    def _evaluating(self, model: Any) -> Iterator[None]:
        """The model in evaluation mode within the block; `eval` and `train` take 10 ms each to find its modules."""
        if not self._modules or self._modules[0] is not model:
            self._modules = [*model.modules()]
        before = [module.training for module in self._modules]
        for module in self._modules:
            vars(module)["training"] = False
        try:
            yield
        finally:
            for module, was_training in zip(self._modules, before, strict=True):
                vars(module)["training"] = was_training

    def _engine_of(self, model: Any, asked: Sequence[tuple[int, Example]]) -> SharedPrefixes:
        options = self._options
        sampling = Sampling(options.samples, options.temperature, options.top_p, options.max_new_tokens)
        if self.tokens_per_batch is None and (free := tokens_beside_training(self._opened, model, self._ranks)):
            longest = max(prompt.num_tokens for _, prompt in asked)
            most = len(asked) * (longest + options.samples * options.max_new_tokens)
            self.tokens_per_batch = min(free, 1 << most.bit_length())
        return SharedPrefixes(with_batches(self._opened, self.tokens_per_batch), sampling, min_compiled=0)

    def _rewarded(self, number: int, prompt: Example, group: Sequence[Sample]) -> list[Drawn]:
        record, turn = self._questions[number]
        row, are_cut = row_of(record, turn, prompt.image_keys), [answer.ended == "length" for answer in group]
        rewards = self._reward(row, [answer.text for answer in group], are_cut, record.metadata)
        return [
            Drawn(answer.token_ids, reward, is_cut, answer.tempered, answer.text)
            for answer, reward, is_cut in zip(group, rewards, are_cut, strict=True)
        ]
