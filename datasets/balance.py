"""How answers are distributed: the majority baseline, and weights that balance them in the loss (`batch.balance`).

Design of balance: weights instead of resampling, so every record is trained on once an epoch and the questions of an
image share its tokens. A weight multiplies all targets of a record, and the loss of a step is divided by the weights in
it, as in `torch.nn.functional.cross_entropy(weight=...)` (train/data/sampler.py). The mean weight is 1.

The classes of `answer` are the answers to one question text. Each answer of a question has the same total weight, and
each question keeps its total. The classes of `category` are the values of the records' metadata.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal

from lookonce.datasets.curriculum import texts_of
from lookonce.datasets.formats.record import Record
from lookonce.errors import RecordsError
from lookonce.text import Notify, count, nfc, quiet, quoted


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
        return cls((turn.question, turn.answer) for record in records for turn in record.turns)

    def answer(self, question: str) -> str:
        return self._best.get(nfc(question), self._fallback)


def _most(answers: Counter[str]) -> str:
    """Return the most frequent answer, the first of equals; empty if there is none."""
    return answers.most_common(1)[0][0] if answers else ""


By = Literal["answer", "category"]
Class = tuple[Hashable, Hashable]
"""What alternatives belong to, such as a question, and the alternative."""
MAX_CLASSES = 0.5
"""The most classes for each record with which classes are said to be repeated."""


def balance_weights(classes: Sequence[Class]) -> list[float]:
    """The weight of each item: all alternatives of a group have the same total weight, and the mean in a group is 1."""
    size, size_of_group = Counter(classes), Counter(group for group, _ in classes)
    num_alternatives = Counter(group for group, _ in size)
    return [size_of_group[group] / (num_alternatives[group] * size[group, value]) for group, value in classes]


def record_weights(records: Sequence[Record], by: By, notify: Notify = quiet) -> list[float]:
    """The weight of each record's targets; `notify` gets the least and the largest.

    Raises:
        RecordsError: a record has several answers or no category; or hardly two records have the same answer.
    """
    classes = [_class_of(record, by) for record in records]
    num_classes, things = len({*classes}), {"answer": "answers", "category": "categories"}[by]
    if len({group for group, _ in classes}) == num_classes:
        raise RecordsError(
            f"`batch.balance: {by}` changes nothing, because there are no two {things} to balance; leave it out"
        )
    if num_classes > MAX_CLASSES * len(records):
        raise RecordsError(
            f"`batch.balance: {by}` needs {things} that occur several times, and {count(len(records), 'record')} have "
            f"{num_classes:,} different ones, as texts and points do; leave it out"
        )
    weights = balance_weights(classes)
    least, largest = (
        f"{weights[n]:.2g} ({quoted(str(classes[n][1]))})" for n in map(weights.index, (min(weights), max(weights)))
    )
    notify(f"`batch.balance: {by}`: records of {num_classes:,} {things} weigh from {least} to {largest}")
    return weights


def _class_of(record: Record, by: By) -> Class:
    if by == "answer":
        if len(record.turns) != 1:
            raise RecordsError(
                f"{record.origin} has {len(record.turns)} questions, and `batch.balance: answer` needs records of one; "
                "write them one by one with: lookonce data convert RECORDS OUT --to flat, or balance by category"
            )
        turn = record.turns[0].in_nfc
        return turn.question, turn.answer
    categories = texts_of(record, "category")
    if len(categories) != 1:
        raise RecordsError(
            f"{record.origin} has {len(categories)} values of `category` in its metadata, and `batch.balance: "
            "category` needs one for each training record; `data.stage_map` gives categories to questions"
        )
    return None, categories[0]
