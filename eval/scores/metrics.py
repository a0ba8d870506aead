"""Predictions and their scores: strict exact match beside the majority baseline.

Design: an answer is right if it equals the reference apart from spaces around it; lenient metrics, for which "no"
matches "none", have spoiled published numbers. A record with several `references` in its metadata, which `lookonce data
prepare` makes from rows with different answers, has several right answers. The majority baseline is always reported
too: the most frequent training answer of each question, given without looking at any image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookonce.text import table


@dataclass(frozen=True)
class Prediction:
    """One question: the reference answer, the model's answer and the majority answer."""

    origin: str
    images: tuple[str, ...]
    question: str
    answer: str
    predicted: str
    majority: str
    references: tuple[str, ...] = ()
    """All right answers, if there are several."""

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
    """Exact match and majority baseline over some questions, as shares."""

    num_questions: int
    exact_match: float
    majority: float


@dataclass(frozen=True)
class Evaluation:
    """Predictions and their scores, overall and by question text."""

    predictions: list[Prediction]
    overall: Score
    by_question: dict[str, Score]

    @classmethod
    def of(cls, predictions: list[Prediction]) -> Evaluation:
        questions = sorted({prediction.question for prediction in predictions})
        groups = {question: [p for p in predictions if p.question == question] for question in questions}
        return cls(predictions, score(predictions), {question: score(group) for question, group in groups.items()})

    def text(self) -> str:
        """One line per question text, the overall score last."""
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
