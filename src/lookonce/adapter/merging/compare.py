"""What merging costs in answers: the same questions, asked of the model with its adapter and of the merged model.

Design: the questions are some of `data.val`, all those about images that `train.seed` draws, as for `eval.every`. They
are answered from the cache with the run's own settings and engine, first with the adapter as `lookonce eval` does, then
by the merged model. One model is in memory at a time. Nothing is written: these are no scores of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.environment import best_device
from lookonce.eval.answers.accuracy import draw
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.scores.prediction import Prediction
from lookonce.run.config import RunFile
from lookonce.run.open import OpenRun
from lookonce.run.sections.train import UNQUANTISED
from lookonce.text import quoted
from lookonce.train.model.load import PRECISIONS, load_trained, load_without_tower

SPLIT = "val"
NUM_SHOWN = 3
"""Questions with different answers that are printed."""


@dataclass(frozen=True)
class Comparison:
    """Answers of the adapter and of the merged model to the same questions."""

    num_questions: int
    num_different: int
    """Questions with different answers."""
    adapter: float
    """Share of right answers (exact match) of the model with its adapter."""
    merged: float
    """The same of the merged model."""
    precision: str
    """`train.precision`, in which both answered."""
    different: list[dict[str, str]]
    """Some of the questions with different answers, with both."""

    @classmethod
    def of(cls, adapter: list[Prediction], merged: list[Prediction], precision: str) -> Comparison:
        """Compare answers to the same questions, of which there is at least one."""
        pairs = [(one, other) for one, other in zip(adapter, merged, strict=True) if one.predicted != other.predicted]
        shown = [
            {"question": one.question, "adapter": one.predicted, "merged": other.predicted}
            for one, other in pairs[:NUM_SHOWN]
        ]
        return cls(len(adapter), len(pairs), _score(adapter), _score(merged), precision, shown)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people: how many answers differ, and both scores."""
        return [
            f"  answers     {self.num_different:,} of {self.num_questions:,} differ ({SPLIT}, in {self.precision})",
            f"  exact match {self.adapter:.1%} with the adapter, {self.merged:.1%} merged",
            *(
                f"    {quoted(one['question'])}: {quoted(one['adapter'])}, merged {quoted(one['merged'])}"
                for one in self.different
            ),
        ]


def _score(answers: list[Prediction]) -> float:
    return sum(one.is_right for one in answers) / len(answers)


def draw_questions(opened: OpenRun, most: int) -> Questions | None:
    """At most `most` validation questions of a run; None if it has none."""
    records = opened.records[SPLIT]
    if not records:
        return None
    keys = [[opened.key_of(path) for path in record.images] for record in records]
    drawn = draw(records, keys, most, opened.run.train.seed)
    return Questions.of(opened.changed(records={**opened.records, SPLIT: drawn}), SPLIT)


def compare(questions: Questions, adapter: Path, merged: Path) -> Comparison:
    """Ask both models; `merged` is a model folder.

    Raises:
        LookonceError: a model cannot be loaded, or its memory does not suffice.
    """
    opened = questions.opened
    answering = opened.run.eval.model_copy(update={"frozen": None})  # weights as in training, or not quantised
    run = opened.run.model_copy(update={"eval": answering})
    before = _answers(questions, partial(load_trained, opened.model_folder, run, adapter))
    after = _answers(questions, partial(_load_merged, run, merged))
    return Comparison.of(before, after, run.train.precision)


def _load_merged(run: RunFile, merged: Path) -> Any:
    folder = ModelFolder.open(str(merged), is_local=True)
    dtype = PRECISIONS[run.train.precision]
    return load_without_tower(folder, dtype, run.model.attention, UNQUANTISED).to(best_device()).eval()


def _answers(questions: Questions, load: Callable[[], Any]) -> list[Prediction]:
    """The answers of a model, stage by stage; its memory is free again afterwards."""
    model, answers = load(), dict[int, Answer]()
    for number, stage in enumerate(questions.stages):
        part = questions.at_stage(number, answers)
        found = part.of_questions(dict(part.answer(model, range(len(part.batches)))))
        answers |= {stage[place]: answer for place, answer in found.items()}
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return questions.after_all(answers).predictions(answers)
