"""The answers of each question, and what always giving the most frequent one scores.

The majority baseline needs no image: what a model scores above it, it may have seen. Learned on the first file and
scored on each other one; within the file where there is only one, which flatters it a little, though a question that
is asked once is answered as one never seen: with the most frequent answer of all. Right is the very answer, or one of a
record's references.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookonce.datasets.audit.findings import Finding, find
from lookonce.datasets.audit.questions import Asked
from lookonce.text import count, quoted, share

NUM_TOP = 10
"""Answers of a question that are named."""
MAX_QUESTIONS = 1000
"""Questions whose answers are listed, those asked most; in free text nearly every question is asked once."""

ENOUGH = 20
"""Times that a question is asked before one answer looks like a rule."""

Answers = dict[str, Counter[str]]


@dataclass(frozen=True)
class Vocabulary:
    """The answers of one question."""

    question: str
    num_asked: int
    num_answers: int
    """Different ones."""
    top: tuple[tuple[str, int], ...]
    """The most frequent answers and how often each is given."""

    @property
    def majority(self) -> str:
        return self.top[0][0]

    @property
    def majority_share(self) -> float:
        return share(self.top[0][1], self.num_asked)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"majority": self.majority, "majority_share": self.majority_share}


@dataclass(frozen=True)
class Baseline:
    """What the most frequent answers of one file score on another's questions."""

    learned_on: str
    scored_on: str
    num_questions: int
    num_right: int

    @property
    def exact_match(self) -> float:
        return share(self.num_right, self.num_questions)

    def text(self) -> str:
        learned = "itself" if self.learned_on == self.scored_on else self.learned_on
        asked = count(self.num_questions, "question")
        return f"{self.exact_match:.1%} of {asked} of {self.scored_on}, learned on {learned}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"exact_match": self.exact_match}


def count_answers(questions: Iterable[Asked]) -> Answers:
    """How often each answer is given, by question."""
    found: Answers = {}
    for one in questions:
        found.setdefault(one.question, Counter())[one.answer] += 1
    return found


def vocabularies(answers: Answers) -> list[Vocabulary]:
    """Of the questions asked most, most first."""
    found = [
        Vocabulary(question, counts.total(), len(counts), tuple(counts.most_common(NUM_TOP)))
        for question, counts in answers.items()
    ]
    return sorted(found, key=lambda each: -each.num_asked)[:MAX_QUESTIONS]


def find_constants(answers: Answers) -> list[Finding]:
    """Questions that are answered the same each time, however often they are asked."""
    items = [
        {"question": question, "answer": next(iter(counts)), "count": counts.total()}
        for question, counts in answers.items()
        if len(counts) == 1 and counts.total() >= ENOUGH
    ]
    return find(
        "constant-answers",
        "note",
        items,
        f"{count(len(items), 'question')} with the same answer every time: nothing in the image decides it",
        lambda item: f"{quoted(item['question'])}: always {quoted(item['answer'])}, {item['count']:,} times",
    )


def baselines(files: Sequence[str], questions: Sequence[Asked]) -> list[Baseline]:
    """Of the first file's most frequent answers on each other file, or on itself if it is alone."""
    asked: dict[str, list[Asked]] = {file: [] for file in files}
    for one in questions:
        asked[one.file].append(one)
    learned = count_answers(asked[files[0]])
    at_least = 1 if len(files) > 1 else 2
    best = {question: counts.most_common(1)[0][0] for question, counts in learned.items() if counts.total() >= at_least}
    of_all = Counter(one.answer for one in asked[files[0]]).most_common(1)[0][0]
    return [
        Baseline(
            files[0],
            file,
            len(asked[file]),
            sum(best.get(one.question, of_all).strip() in map(str.strip, one.accepted) for one in asked[file]),
        )
        for file in files[1:] or files
    ]
