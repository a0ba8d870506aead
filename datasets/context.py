"""Answers to earlier questions in the prompt of a question about the same images (`data.context`).

Design: a context is kept beside the turns of a record, because majority answers and comparisons know a question by its
text. It becomes a text or turns when tokens are made (`Record.shown`). As a text it is a part of the question, so the
questions of a stage remain parallel branches of one prefix. As turns, only the record's own answers are trained on.

Only records of an earlier stage give context, and never an answer to a question that the record itself asks. Records
without images have none.

The answers of a model, in predictions files, are found by the keys of the images and the text of the question, so a
file serves whatever its paths are. Of two answers to a question in one file the first counts. Two files that disagree
are refused: it is unknown which of the two models was not trained on the image.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

from lookonce.datasets.curriculum import DifferentValues, Keys, KeysOf, check_values, value_index
from lookonce.datasets.formats.record import CONTROL_TOKEN, Context, Record, Turn, is_utf8
from lookonce.datasets.text_files import read_jsonl
from lookonce.errors import RecordsError
from lookonce.settings import Same, Section
from lookonce.text import count, listed, located, nfc, quoted

NOT_ANSWERED = "(not answered)"
"""What stands for an answer that is empty or was cut off."""
PLACE = re.compile(r"\{(\w*)\}")
Asked = tuple[Keys, str]
"""The keys of images, and the text of a question about them in NFC."""
Answered = Callable[[Record], Sequence[Turn]]
"""The questions of a record with the answers that the context has."""


class ContextForm(Section):
    """Which questions give context to which, and how it is written."""

    by: Same[Annotated[str, Field(min_length=1)]]
    """The metadata field that says in which stage a record is."""
    order: Same[Annotated[DifferentValues, Field(min_length=2)]]
    """The field's values in the order of the stages. A record has the answers of all stages before its own; records
    with other values get no context and provide none."""
    form: Same[Literal["summary", "turns"]] = "summary"
    """`summary`: the answers are a text in the question. `turns`: they are turns before the question, and not trained
    on."""
    each: Same[str] = "{question} {answer}"
    """How a summary writes each answer; a semicolon stands between two."""
    template: Same[str] = "Known so far: {answers}\n{question}"
    """How a summary and the question are combined into one text."""

    @field_validator("each", "template")
    @classmethod
    def _has_its_placeholders(cls, text: str, info: ValidationInfo) -> str:
        places = set(PLACE.findall(text))
        if info.field_name == "each" and not {"answer"} <= places <= {"answer", "question"}:
            raise ValueError(f"must have {{answer}}, may have {{question}}, and nothing else in braces (got {text!r})")
        if info.field_name == "template" and places != {"answers", "question"}:
            raise ValueError(f"must have {{answers}} and {{question}}, and nothing else in braces (got {text!r})")
        return text

    def stage_of(self, record: Record) -> int | None:
        """The number of a record's stage, from 0; None if it is in none, or in several."""
        return value_index(record, self.by, self.order)

    def check(self, records: Iterable[Record]) -> None:
        """Check that some record is in each stage; raises RecordsError."""
        check_values(records, self.by, self.order, "data.context")

    def write(self, answers: Sequence[Turn], question: str) -> Context | None:
        """The context of a question; None without answers."""
        if not answers:
            return None
        if self.form == "turns":
            return Context(tuple(answers))
        texts = [_filled(self.each, question=turn.question, answer=" ".join(turn.answer.split())) for turn in answers]
        return Context(tuple(answers), _filled(self.template, answers="; ".join(texts), question=question))


def with_context(
    records: Sequence[Record], form: ContextForm, keys_of: KeysOf, answered: Answered = lambda record: record.turns
) -> list[Record]:
    """The records, each with the answers of earlier stages about exactly the same images.

    The answers are in the order of the stages, and within a stage in that of the records.
    """
    stages = [form.stage_of(record) if record.images else None for record in records]
    about: dict[Keys, list[tuple[int, int]]] = defaultdict(list)
    for number, (record, stage) in enumerate(zip(records, stages, strict=True)):
        if stage is not None:
            about[keys_of(record)].append((stage, number))
    results = list(records)
    for members in about.values():
        members.sort()
        for stage, number in members:
            earlier = [records[earlier_number] for earlier_stage, earlier_number in members if earlier_stage < stage]
            results[number] = _with_answers(records[number], earlier, form, answered)
    return results


def _with_answers(record: Record, earlier: Iterable[Record], form: ContextForm, answered: Answered) -> Record:
    own_questions = {nfc(turn.question) for turn in record.turns}
    turns: dict[Turn, Turn] = {}
    for turn in (turn for earlier_record in earlier for turn in answered(earlier_record)):
        if (compared := turn.in_nfc).question not in own_questions:
            turns.setdefault(compared, turn)
    return replace(record, context=form.write(tuple(turns.values()), record.turns[0].question))


def as_shown(text: str, ended: str | None) -> str:
    """A model's answer as a context has it; one that is empty, was cut off or spells a special token is not shown."""
    return text.strip() if ended != "length" and text.strip() and not CONTROL_TOKEN.search(text) else NOT_ANSWERED


def counted(records: Sequence[Record], split: str) -> str:
    """How many records have a context, and how long it is."""
    sizes = [len(record.known) for record in records if record.context]
    mean = f", {sum(sizes) / len(sizes):.1f} in the mean" if sizes else ""
    return (
        f"`data.context`: {len(sizes):,} of {count(len(records), f'{split} record')} have answers to earlier "
        f"questions in their prompts{mean}"
    )


def _filled(template: str, **texts: str) -> str:
    """The template with texts in its places, in which braces have no meaning."""
    return PLACE.sub(lambda place: texts[place[1]], template)


class _Row(BaseModel):
    """What is read of a row."""

    question: str
    predicted: str
    image_keys: Annotated[Keys, Field(min_length=1)]
    ended: str | None = None


def with_given(
    records: Mapping[str, Sequence[Record]], form: ContextForm, paths: Sequence[Path], keys_of: KeysOf
) -> dict[str, list[Record]]:
    """The records with contexts, from predictions files or the records; raises RecordsError if answers are missing."""
    if not paths:
        return {split: with_context(split_records, form, keys_of) for split, split_records in records.items()}
    answer_to = _read_predictions(paths)
    missing: dict[Asked, str] = {}

    def answered(record: Record) -> list[Turn]:
        turns = []
        for turn in record.turns:
            question = keys_of(record), nfc(turn.question)
            if question not in answer_to:
                missing[question] = f"{quoted(turn.question)} of {record.origin}"
            turns.append(Turn(turn.question, answer_to.get(question, NOT_ANSWERED)))
        return turns

    with_answers = {split: with_context(each, form, keys_of, answered) for split, each in records.items()}
    if missing:
        named, files = listed([*missing.values()], 3), listed([str(path) for path in paths])
        raise RecordsError(
            f"`data.context.answers`: {files} lacks {count(len(missing), 'answer')} to earlier questions: {named}; "
            "name all predictions of the training and validation records"
        )
    return with_answers


def _read_predictions(paths: Iterable[Path]) -> dict[Asked, str]:
    """The answers in some predictions files; raises RecordsError if one is missing, wrong, or contradicts another."""
    answers: dict[Asked, tuple[str, Path]] = {}
    for path in paths:
        try:
            for place, value in read_jsonl(path):
                row = _row(value, place)
                answer = as_shown(row.predicted, row.ended)
                known_answer, known_path = answers.setdefault((row.image_keys, nfc(row.question)), (answer, path))
                if nfc(known_answer) != nfc(answer) and known_path != path:
                    raise RecordsError(
                        f"{place} answers {quoted(row.question)} about the same image otherwise than {known_path}; "
                        "name files of different images in `data.context.answers`"
                    )
        except FileNotFoundError:
            raise RecordsError(f"no predictions at {located(path)}; write them with: lookonce eval RUN") from None
    return {question: answer for question, (answer, _) in answers.items()}


def _row(value: object, place: str) -> _Row:
    try:
        row = _Row.model_validate(value)
        if not is_utf8(row.question + row.predicted):
            raise RecordsError(
                f"{place} holds half a character (a lone surrogate); answer again with: lookonce eval RUN"
            )
        return row
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        raise RecordsError(
            f"{place} is not a prediction with image keys: `{name}` is missing or wrong; expected rows as "
            "`lookonce eval` writes them"
        ) from None
