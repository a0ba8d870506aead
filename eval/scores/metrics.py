"""Predictions and their scores: strict exact match, and what guessing would score.

Design: an answer is right if it is the reference, but for spaces around it; lenient metrics that call "no" right for
"none" have spoiled published numbers. A record with several `references` in its metadata, as `lookonce data prepare`
makes of rows whose answers differ, has several right answers. Beside the accuracy always stands the majority baseline:
the most frequent training answer of each question, given without looking at any image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookonce.datasets.records import Record
from lookonce.text import table


@dataclass(frozen=True)
class Prediction:
    """One question asked: what the reference says, what the model said, what guessing says."""

    origin: str
    images: tuple[str, ...]
    question: str
    answer: str
    predicted: str
    majority: str
    references: tuple[str, ...] = ()
    """Where there are several right answers, all of them."""

    @property
    def is_right(self) -> bool:
        return self._is_right(self.predicted)

    @property
    def is_majority_right(self) -> bool:
        return self._is_right(self.majority)

    def _is_right(self, given: str) -> bool:
        return given.strip() in {text.strip() for text in (self.answer, *self.references)}

    def to_json(self) -> dict[str, Any]:
        value = asdict(self) | {"right": self.is_right}
        if not self.references:
            del value["references"]
        return value


@dataclass(frozen=True)
class Score:
    """Shares of right answers over some questions."""

    num_questions: int
    exact_match: float
    majority: float


@dataclass(frozen=True)
class Evaluation:
    """Predictions and their scores, in all and by question text."""

    predictions: list[Prediction]
    overall: Score
    by_question: dict[str, Score]

    @classmethod
    def of(cls, predictions: list[Prediction]) -> Evaluation:
        questions = sorted({prediction.question for prediction in predictions})
        groups = {question: [p for p in predictions if p.question == question] for question in questions}
        return cls(predictions, score(predictions), {question: score(group) for question, group in groups.items()})

    def text(self) -> str:
        """A line a question, the overall score last."""
        scores = [*self.by_question.items(), ("all", self.overall)]
        lines = [(name, f"{s.num_questions:,}", f"{s.exact_match:.1%}", f"{s.majority:.1%}") for name, s in scores]
        return table(("question", "asked", "exact match", "majority"), lines)

    def to_json(self) -> dict[str, Any]:
        by_question = {question: asdict(value) for question, value in self.by_question.items()}
        return {"overall": asdict(self.overall), "by_question": by_question}


def score(predictions: Sequence[Prediction]) -> Score:
    """Exact match and majority baseline, as shares."""
    count = len(predictions)
    right, guessed = sum(p.is_right for p in predictions), sum(p.is_majority_right for p in predictions)
    return Score(count, right / max(count, 1), guessed / max(count, 1))


class Majority:
    """The most frequent training answer of each question; for a question never seen, the most frequent of all."""

    def __init__(self, records: Iterable[Record]) -> None:
        turns = [turn for record in records for turn in record.turns]
        by_question: dict[str, Counter[str]] = {}
        for turn in turns:
            by_question.setdefault(turn.question, Counter())[turn.answer] += 1
        self._best = {question: answers.most_common(1)[0][0] for question, answers in by_question.items()}
        self._fallback = Counter(turn.answer for turn in turns).most_common(1)[0][0] if turns else ""

    def answer(self, question: str) -> str:
        return self._best.get(question, self._fallback)
