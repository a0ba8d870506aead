"""The answers of each question, and the majority baseline.

The majority baseline needs no image, so only what a model scores above it may come from the images. It is learned on
the first file and scored on each other file. A single file is scored on itself, which is slightly too good; a question
that is asked only once then counts as unknown. An answer is right if it equals the reference, or one of several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lookonce.datasets.audit.findings import Finding, findings_from
from lookonce.datasets.audit.questions import QuestionAnswer
from lookonce.datasets.majority import Majority
from lookonce.text import count, quoted, share

NUM_TOP = 10
"""A vocabulary lists this many answers of a question."""
MAX_QUESTIONS = 1000
"""The most questions whose answers are listed; in free text nearly every question is asked only once."""
MIN_ASKED = 20
"""A question must be asked this often before a constant answer is reported."""

Answers = dict[str, Counter[str]]


@dataclass(frozen=True)
class Vocabulary:
    """The answers of one question."""

    question: str
    num_asked: int
    num_answers: int
    """The number of distinct answers."""
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
    """The score of one file's most frequent answers on the questions of another file."""

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


def count_answers(questions: Iterable[QuestionAnswer]) -> Answers:
    """Count how often each answer is given to each question."""
    found: Answers = {}
    for one in questions:
        found.setdefault(one.question, Counter())[one.answer] += 1
    return found


def vocabularies(answers: Answers) -> list[Vocabulary]:
    """List the answers of the questions asked most, most first."""
    found = [
        Vocabulary(question, counts.total(), len(counts), tuple(counts.most_common(NUM_TOP)))
        for question, counts in answers.items()
    ]
    return sorted(found, key=lambda each: -each.num_asked)[:MAX_QUESTIONS]


def find_constants(answers: Answers) -> list[Finding]:
    """Find questions that are asked often and always have the same answer."""
    items = [
        {"question": question, "answer": next(iter(counts)), "count": counts.total()}
        for question, counts in answers.items()
        if len(counts) == 1 and counts.total() >= MIN_ASKED
    ]
    return findings_from(
        "constant-answers",
        "note",
        items,
        f"{count(len(items), 'question')} with the same answer every time: nothing in the image decides it",
        lambda item: f"{quoted(item['question'])}: always {quoted(item['answer'])}, {item['count']:,} times",
    )


def baselines(files: Sequence[str], questions: Sequence[QuestionAnswer]) -> list[Baseline]:
    """Score the first file's most frequent answers on each other file, or on itself if it is the only one."""
    asked: dict[str, list[QuestionAnswer]] = {file: [] for file in files}
    for one in questions:
        asked[one.file].append(one)
    majority = Majority(((one.question, one.answer) for one in asked[files[0]]), min_asked=1 if files[1:] else 2)
    return [
        Baseline(
            files[0],
            file,
            len(asked[file]),
            sum(majority.answer(one.question).strip() in map(str.strip, one.accepted) for one in asked[file]),
        )
        for file in files[1:] or files
    ]
