"""The row of each question in a predictions file, before the answer is filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lookonce.datasets.majority import Majority, MajorityInContext
from lookonce.datasets.records import Record
from lookonce.eval.scores.prediction import Prediction, label
from lookonce.train.data.tokenize import Example


def unanswered(
    asked: Sequence[tuple[Record, int]], examples: Sequence[Example], training: Sequence[Record]
) -> Iterator[Prediction]:
    """The rows of some questions, each a record and the number of its turn; `training` has the majority answers."""
    majority, in_context = Majority.of_records(training), MajorityInContext(training)
    for (record, turn), example in zip(asked, examples, strict=True):
        row = row_of(record, turn, example.image_keys)
        known = in_context.answer(row.earlier, row.question) if row.earlier else None
        yield replace(row, majority=majority.answer(row.question), majority_in_context=known)


def row_of(record: Record, turn: int, image_keys: Sequence[str]) -> Prediction:
    """The row of one question, without majority answers."""
    return Prediction(
        origin=record.origin,
        images=tuple(map(str, record.images)),
        question=record.turns[turn].question,
        answer=record.turns[turn].answer,
        predicted="",
        majority="",
        references=record.references,
        image_keys=tuple(image_keys),
        turn=turn,
        source=label(record.metadata.get("source")),
        category=label(record.metadata.get("category")),
        stage=label(record.metadata.get("stage")),
        system=record.system,
        earlier=record.turns[:turn],
    )
