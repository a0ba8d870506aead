"""The majority baseline: always give the most frequent training answer of a question, without looking at any image."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from lookonce.datasets.formats.record import Record
from lookonce.text import nfc


class Majority:
    """The most frequent answer of each question, in NFC; for other questions, the most frequent answer of all."""

    def __init__(self, questions: Iterable[tuple[str, str]], min_asked: int = 1) -> None:
        """Learn from questions with their answers; a question asked less than `min_asked` times counts as unknown."""
        by_question: dict[str, Counter[str]] = defaultdict(Counter)
        of_all: Counter[str] = Counter()
        for question, answer in questions:
            by_question[nfc(question)][nfc(answer)] += 1
            of_all[nfc(answer)] += 1
        self._best = {text: _most(answers) for text, answers in by_question.items() if answers.total() >= min_asked}
        self._fallback = _most(of_all)

    @classmethod
    def of_records(cls, records: Iterable[Record]) -> Majority:
        """Learn from all turns of some records."""
        return cls((turn.question, turn.answer) for record in records for turn in record.turns)

    def answer(self, question: str) -> str:
        return self._best.get(nfc(question), self._fallback)


def _most(answers: Counter[str]) -> str:
    """Return the most frequent answer, the first of equals; empty if there is none."""
    return answers.most_common(1)[0][0] if answers else ""
