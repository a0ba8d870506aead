"""The majority baseline: always give the most frequent training answer of a question, without looking at any image.

In a conversation the earlier turns often say what the answer is: after "Is there a polyp?" "no", there are none to
count. The majority given the context has this knowledge too, and still does not look at any image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lookonce.datasets.formats.record import Record, Turn


class Majority:
    """The most frequent answer of each question; for other questions, the most frequent answer of all."""

    def __init__(self, asked: Iterable[tuple[str, str]], min_asked: int = 1) -> None:
        """Learn from questions with their answers; a question asked less than `min_asked` times counts as unknown."""
        by_question: dict[str, Counter[str]] = {}
        of_all: Counter[str] = Counter()
        for question, answer in asked:
            by_question.setdefault(question, Counter())[answer] += 1
            of_all[answer] += 1
        self._best = {text: _most(answers) for text, answers in by_question.items() if answers.total() >= min_asked}
        self._fallback = _most(of_all)

    @classmethod
    def of_records(cls, records: Iterable[Record]) -> Majority:
        """Learn from all turns of some records."""
        return cls((turn.question, turn.answer) for record in records for turn in record.turns)

    def answer(self, question: str) -> str:
        return self._best.get(question, self._fallback)


class MajorityInContext:
    """The most frequent answer of each question after the same earlier turns: the same questions with the same answers.

    Answers of a context come before the turns. After other turns it is the most frequent answer of the question,
    whatever came before it.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        records = list(records)
        self._of_question = Majority.of_records(records)
        answers: dict[tuple[tuple[Turn, ...], str], Counter[str]] = {}
        for record in records:
            for number, turn in enumerate(record.turns):
                if before := (*record.known, *record.turns[:number]):
                    answers.setdefault((before, turn.question), Counter())[turn.answer] += 1
        self._best = {asked: _most(found) for asked, found in answers.items()}

    def answer(self, earlier: tuple[Turn, ...], question: str) -> str:
        return self._best.get((earlier, question), self._of_question.answer(question))


def _most(answers: Counter[str]) -> str:
    """Return the most frequent answer, the first of equals; empty if there is none."""
    return answers.most_common(1)[0][0] if answers else ""
