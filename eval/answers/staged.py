"""Questions in stages: the prompts of later stages have the model's own answers to the questions of earlier ones.

Design: the questions of a stage are answered as any others, in dialogues and waves. Their prompts follow from the
answers before, so an interrupted evaluation asks the same ones again. To wait for the last answer of each stage costs
little, because a stage has questions about nearly every image. An answer is shown to later questions as text, of which
the tokenizer makes tokens again, as it would of a record that has this text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from lookonce.datasets.curriculum.context import NOT_ANSWERED, as_shown, with_context
from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.dialogues import Asked
from lookonce.eval.decoding.answer import Answer
from lookonce.run.open import OpenRun

Staged = Literal["own", "true", "none"]
"""Whose answers to earlier questions prompts have (`eval.staged`)."""


def questions_of(opened: OpenRun, records: Iterable[Record], staged: Staged) -> list[Asked]:
    """The questions of some records, with true answers as context if `staged` is true, otherwise without any."""
    if staged == "true":
        found = with_true_answers(opened, records)
    else:
        found = [replace(record, context=None) if record.context else record for record in records]
    return [(record, number) for record in found for number in range(len(record.turns))]


def with_true_answers(opened: OpenRun, records: Iterable[Record]) -> list[Record]:
    """Some records with true answers as context, whatever they had; without any if the run has no `data.context`."""
    form, found = opened.run.data.context, [replace(record, context=None) for record in records]
    return with_context(found, form, opened.images.keys_of) if form else found


def true_before(opened: OpenRun, asked: Sequence[Asked]) -> list[tuple[Turn, ...]]:
    """What the records say before each question: the answers of its context and of its earlier turns."""
    records = {id(record): record for record, _ in asked}
    true = dict(zip(records, with_true_answers(opened, records.values()), strict=True))
    return [(*true[id(record)].known, *record.turns[:turn]) for record, turn in asked]


def stages_of(opened: OpenRun, asked: Sequence[Asked], staged: Staged) -> list[list[int]]:
    """The numbers of the questions that are answered together: those of a stage if contexts have own answers, or all.

    Questions that are in no stage are asked with the first.
    """
    form = opened.run.data.context
    if form is None or staged != "own":
        return [[*range(len(asked))]]
    found: dict[int, list[int]] = {}
    for number, (record, _) in enumerate(asked):
        found.setdefault(form.stage_of(record) or 0, []).append(number)
    return [found[stage] for stage in sorted(found)]


def in_context(
    opened: OpenRun, asked: Sequence[Asked], numbers: Iterable[int], answers: Mapping[int, Answer]
) -> list[Asked]:
    """Some questions by their numbers, with the answers to all questions of earlier stages as context."""
    form = opened.run.data.context
    assert form, "without `data.context` no question waits for the answers to others"
    wanted = [*numbers]
    records: dict[int, Record] = {}
    own: dict[int, list[Turn]] = {}
    for number in sorted({*answers, *wanted}):
        record, turn = asked[number]
        records[id(record)] = record
        own.setdefault(id(record), []).append(Turn(record.turns[turn].question, _shown(opened, answers.get(number))))
    found = with_context([*records.values()], form, opened.images.keys_of, lambda record: own[id(record)])
    with_id = dict(zip(records, found, strict=True))
    return [(with_id[id(asked[number][0])], asked[number][1]) for number in wanted]


def _shown(opened: OpenRun, answer: Answer | None) -> str:
    """An answer as later prompts have it; one that spells a special token could begin a message there."""
    if answer is None or any(token in answer.text for token in opened.chat_tokenizer.special_tokens):
        return NOT_ANSWERED
    return as_shown(answer.text, answer.ended)
