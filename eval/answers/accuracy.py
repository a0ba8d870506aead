"""Exact match of a model while it is trained, on the validation questions or some of them.

Design: answers are those that an evaluation of these weights would give. The model is taken out of its training for
them: its attention and its layers are as they were loaded. Each time has an engine of its own, so buffers and recorded
passes are gone when the training goes on. With predicted answers as context, all ranks end a stage before the next.
On a GPU a batch is as large as the memory beside the training allows, on whichever rank has least. A part of the
questions is all those about some images, which the seed draws.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lookonce.datasets.records import Record
from lookonce.eval.answers.engines import Engine, engine_of, tokens_beside_training
from lookonce.eval.answers.questions import Dialogues, in_context, questions_of, row_of, stages_of
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.statistics import clusters_of
from lookonce.run.open import OpenRun
from lookonce.train.loop.distributed import ALONE, Ranks
from lookonce.train.model.compile import as_loaded
from lookonce.train.model.load import PRECISIONS


class Accuracy:
    """Counts the right answers of a model; each rank answers its share of the questions."""

    def __init__(self, opened: OpenRun, ranks: Ranks = ALONE) -> None:
        """Choose the questions and make their prompts."""
        self._opened, self._ranks = opened, ranks
        records, most = opened.records["val"], opened.run.eval.max_questions
        images = [[opened.key_of(path) for path in record.images] for record in records]
        if most:
            records = draw(records, images, most, opened.run.train.seed)
        staged = opened.run.eval.staged
        self._asked = questions_of(opened, records, staged)
        self._stages = stages_of(opened, self._asked, staged)
        self._dialogues = Dialogues.of(opened, self._asked)
        prompts = self._dialogues.prompts
        self._rows = [row_of(*one, prompt.image_keys) for one, prompt in zip(self._asked, prompts, strict=True)]

    def __call__(self, model: Any) -> dict[str, float]:
        """The numbers of this rank's `right` answers and `questions`."""
        known: dict[int, Answer] = {}
        right = num_questions = 0
        with as_loaded(model, self._opened.run.model.attention):
            for stage in self._stages:
                mine = self._answered(model, stage, known)
                right += sum(self._rows[number].accepts(answer.text) for number, answer in mine.items())
                num_questions += len(mine)
                known |= self._of_all(mine) if len(self._stages) > 1 else {}
        return {"right": right, "questions": num_questions}

    def _answered(self, model: Any, stage: Sequence[int], known: Mapping[int, Answer]) -> dict[int, Answer]:
        """This rank's answers to its share of the questions of a stage, after those that are `known`."""
        dialogues, engine = self._dialogues, self._engine(model)
        if len(self._stages) > 1:
            dialogues = Dialogues.of(self._opened, in_context(self._opened, self._asked, stage, known))
        mine = dialogues.plan(engine)[self._ranks.rank :: self._ranks.num_ranks]
        found = {
            stage[index]: answer
            for batch, answers in zip(mine, dialogues.answer(engine, model, mine, self._opened.notify), strict=True)
            for index, answer in zip(dialogues.questions(batch), answers, strict=True)
        }
        del engine
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def _of_all(self, mine: dict[int, Answer]) -> dict[int, Answer]:
        """The answers of all ranks."""
        gathered = self._ranks.gather(mine) or []
        return self._ranks.first_decides(lambda: {number: one for some in gathered for number, one in some.items()})

    def _engine(self, model: Any) -> Engine:
        """A new engine, whose batches fit beside the training."""
        opened = self._opened
        if model.device.type != "cuda" or opened.run.eval.tokens_per_batch:
            return engine_of(opened)
        torch.cuda.empty_cache()
        free = tokens_beside_training(opened.model_folder, PRECISIONS[opened.run.train.precision])
        return engine_of(opened, tokens_per_batch=-self._ranks.largest(-free))


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
