"""The row of each question in a predictions file, before the answer is filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lookonce.datasets.majority import Majority, MajorityInContext
from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.dialogues import Asked, Turns
from lookonce.eval.answers.staged import Staged
from lookonce.eval.scores.prediction import Prediction, label
from lookonce.train.data.tokenize import Example


def unanswered(
    asked: Sequence[Asked],
    earlier: Sequence[tuple[Turn, ...]],
    true: Sequence[tuple[Turn, ...]],
    examples: Sequence[Example],
    training: Sequence[Record],
    turns: Turns,
    staged: Staged,
) -> Iterator[Prediction]:
    """The rows of some questions, each with the turns before it in its prompt; `training` has the majority answers.

    `true` is what the records say before each question. The majority given the context knows this also where prompts
    have the model's own answers: otherwise a model with wrong answers would lower what it is compared with.
    """
    majority, in_context = Majority.of_records(training), MajorityInContext(training)
    for (record, turn), before, told, example in zip(asked, earlier, true, examples, strict=True):
        row = row_of(record, turn, example.image_keys)
        has_context = before or record.known
        yield replace(
            row,
            majority=majority.answer(row.question),
            majority_in_context=in_context.answer(told, row.question) if has_context else None,
            earlier=before,
            earlier_answers=turns if before else None,
            context=record.known,
            context_answers=None if staged == "none" or not record.known else staged,
        )


def row_of(record: Record, turn: int, image_keys: Sequence[str]) -> Prediction:
    """The row of one question, without majority answers and earlier turns."""
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
    )
