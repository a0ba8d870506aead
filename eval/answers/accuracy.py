"""Scores validation questions, or some of them, while a model is trained, by the metric that counts.

Answers are those that an evaluation of these weights gives: attention and layers are as they were loaded. Each call has
an engine of its own, so its buffers and recorded passes are freed when the training goes on. On a GPU a batch fits the
free memory of the rank that has least. A part of the questions is all those about some images, which the seed draws.
The first rank scores the answers of all ranks, so all have the same number, also of a metric that is no mean.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lookonce.datasets.records import Record
from lookonce.eval.answers.engines import tokens_beside_training, with_batches
from lookonce.eval.answers.files import Answered
from lookonce.eval.answers.questions import Questions, row_of
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.scores.metric import EXACT, working_scorer
from lookonce.eval.statistics import clusters_of
from lookonce.run.open import OpenRun
from lookonce.train.loop.distributed import ALONE, Ranks
from lookonce.train.model.compile import as_loaded


class Accuracy:
    """Scores the answers of a model; each rank answers its share of the questions."""

    def __init__(self, opened: OpenRun, ranks: Ranks = ALONE) -> None:
        """Choose the questions and make their prompts.

        Raises:
            UsageError: the metric cannot be computed here, or applies to none of the questions.
        """
        self._opened, self._ranks = opened, ranks
        records, most = opened.records["val"], opened.run.eval.max_questions
        if most:
            images = [[opened.key_of(path) for path in record.images] for record in records]
            records = draw(records, images, most, opened.run.train.seed)
        self._questions = questions = Questions.of(opened.changed(records={**opened.records, "val": records}), "val")
        prompts = zip(questions.record_turns, questions.examples, strict=True)
        self._rows = [row_of(*question, prompt.image_keys) for question, prompt in prompts]
        self._scorer = working_scorer(self._rows, opened.run.eval.metric, "the validation questions")

    def __call__(self, model: Any) -> dict[str, float]:
        """The share of right answers, `exact_match`; the `score` by another metric; how many questions it is of."""
        answers: dict[int, Answer] = {}
        stages = self._questions.stages
        with as_loaded(model, self._opened.run.model.attention):
            for number, stage in enumerate(stages):
                # With a new engine each time, whose batches fit beside the training.
                part = replace(self._questions.at_stage(number, answers), opened=self._beside_training(model))
                batches = range(len(part.batches))[self._ranks.rank :: self._ranks.num_ranks]
                answered: Answered = {}
                for of_rank in self._ranks.gather_for_all(dict(part.answer(model, batches, shows_progress=False))):
                    answered |= of_rank
                answers |= {stage[n]: answer for n, answer in part.of_questions(answered).items()}
                del part
                if model.device.type == "cuda":
                    torch.cuda.empty_cache()
        return self._ranks.first_decides(lambda: self._score([answers[number].text for number in sorted(answers)]))

    def _score(self, texts: Sequence[str]) -> dict[str, float]:
        right = sum(row.accepts(text) for row, text in zip(self._rows, texts, strict=True))
        score = {} if self._scorer.metric == EXACT else {"score": float(self._scorer(texts).mean())}
        return {"exact_match": right / len(texts), **score, "num_questions": len(self._scorer.rows)}

    def _beside_training(self, model: Any) -> OpenRun:
        opened, given = self._opened, self._opened.run.eval.tokens_per_batch
        return with_batches(opened, given or tokens_beside_training(opened, model, self._ranks))


def draw(records: Sequence[Record], images: Sequence[Sequence[str]], most: int, seed: int) -> list[Record]:
    """Some records with at most `most` questions, in their order: all those about images drawn by the seed.

    `images` are the keys of each record's images. If the first images drawn have more questions, they are the part.
    """
    together = defaultdict(list)
    shared = [keys or [f"record {number}"] for number, keys in enumerate(images)]
    for number, cluster in enumerate(clusters_of(shared).tolist()):
        together[cluster].append(number)
    groups = list(together.values())
    random.Random(seed).shuffle(groups)
    chosen: list[int] = []
    left = most
    for group in groups:
        num_questions = sum(len(records[number].turns) for number in group)
        if not chosen or num_questions <= left:
            chosen += group
            left -= num_questions
    return [records[number] for number in sorted(chosen)]
