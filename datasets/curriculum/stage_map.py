"""A stage map: a YAML file with the stage and category of each question text, so that any records can have stages.

    questions:
      "Is there text?": {stage: 1, category: yes/no}
      "Where is the finding?": {stage: 2}
    default: {stage: 3}

Design: stages belong to questions, not to rows. Labels that were given row by row differ between rows with the same
question, and a curriculum over them would have the same question in several stages. So the map replaces what records
say themselves. A question that the map lacks is an error unless there is a default, because its records would be in no
stage and silently miss from a selection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from lookonce.datasets.formats.record import Record
from lookonce.errors import RecordsError
from lookonce.settings import MAX_COUNT, Section, read_settings
from lookonce.text import Notify, count, listed, nfc, quiet, quoted

NUM_NAMED = 5
"""How many questions a message names."""
EXPECTED = 'a mapping with `questions`, such as {questions: {"Is there text?": {stage: 1}}}'


Stage = Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)]


class QuestionStage(Section):
    """The metadata of records with a question."""

    stage: Stage | None = None
    """The stage of a curriculum."""
    category: str | None = None
    """The kind of question."""

    @model_validator(mode="after")
    def _says_something(self) -> QuestionStage:
        if self.stage is None and self.category is None:
            raise ValueError("needs a stage or a category")
        return self


class StageMap(Section):
    """The stage and category of each question."""

    questions: dict[Annotated[str, AfterValidator(nfc)], QuestionStage]
    """By question text, which must be the same to the letter; Unicode's normal form does not count."""
    default: QuestionStage | None = None
    """For questions that the map lacks."""

    def find(self, question: str) -> QuestionStage | None:
        """The entry of a question; None if it has none."""
        return self.questions.get(nfc(question), self.default)


def read_stage_map(path: Path) -> StageMap:
    """The stage map in a file.

    Raises:
        UsageError: the file is missing or not YAML, or a key or value is wrong.
    """
    return read_settings(path, StageMap, f"the stage map {path}", "correct `data.stage_map`", EXPECTED)


def with_stages(records: dict[str, list[Record]], path: Path, notify: Notify = quiet) -> dict[str, list[Record]]:
    """The records of all splits with the stages and categories of a map in their metadata.

    `notify` gets the number of questions that have the default.

    Raises:
        UsageError: the map is missing or wrong.
        RecordsError: the map lacks questions; counts and names them. Or the questions of one record differ in stage.
    """
    stage_map = read_stage_map(path)
    unknown = Counter(
        question
        for some in records.values()
        for record in some
        for turn in record.turns
        if (question := nfc(turn.question)) not in stage_map.questions
    )
    if unknown and stage_map.default is None:
        raise RecordsError(
            f"the stage map {path} lacks {_questions(unknown)}; add them, or give all others a stage with `default`"
        )
    if unknown:
        notify(f"the stage map {path} gives its default to {_questions(unknown)}")
    return {split: [_staged(record, stage_map.find) for record in some] for split, some in records.items()}


def _questions(unknown: Counter[str]) -> str:
    named = [f"{quoted(question)} ({number:,})" for question, number in unknown.most_common()]
    texts, times = count(len(unknown), "question text"), count(unknown.total(), "time")
    return f"{texts}, asked {times}: {listed(named, NUM_NAMED)}"


def _staged(record: Record, find: Callable[[str], QuestionStage | None]) -> Record:
    found = [find(turn.question) for turn in record.turns]
    if any(one != found[0] for one in found):
        raise RecordsError(
            f"{record.origin}: the questions of one record must have the same stage and category, got "
            f"{listed([quoted(turn.question) for turn in record.turns])}; write a record for each of them"
        )
    entry: dict[str, Any] = found[0].model_dump(exclude_none=True) if found[0] else {}
    return replace(record, metadata={**record.metadata, **entry})
