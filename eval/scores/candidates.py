"""What the likeliest candidates score, beside the greedy answers to the same questions.

Design: a question without candidates counts with its greedy answer, so both are scores of all questions, and their
difference is in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.statistics.intervals import Interval
from lookonce.text import count, table

HEADER = ("candidates", "exact match", "higher than greedy by", "95% interval")


@dataclass(frozen=True)
class CandidateScore:
    """The exact match of the likeliest candidates."""

    num_questions: int
    """Questions that have candidates; the others count with their greedy answers."""
    exact_match: float
    difference: float
    """The exact match of the likeliest candidates less that of the greedy answers."""
    interval: Interval | None
    """The 95 % interval of the difference; None if there are too few images."""
    by_question: dict[str, float]
    """The exact match of each question text."""

    @classmethod
    def of(cls, predictions: Sequence[Prediction], difference: float, interval: Interval | None) -> CandidateScore:
        """The score of some predictions, of which one has candidates at least."""
        rights: dict[str, list[bool]] = {}
        for one in predictions:
            rights.setdefault(one.question, []).append(one.accepts(one.chosen))
        return cls(
            num_questions=sum(one.candidate is not None for one in predictions),
            exact_match=fmean(right for some in rights.values() for right in some),
            difference=difference,
            interval=interval,
            by_question={question: fmean(rights[question]) for question in sorted(rights)},
        )

    def text(self) -> str:
        """A table of one line."""
        interval = self.interval.in_percent() if self.interval else "none"
        name = f"likeliest of {count(self.num_questions, 'question')}"
        return table(HEADER, [(name, f"{self.exact_match:.1%}", f"{100 * self.difference:+.1f}", interval)])
