"""The answers of a model in predictions files, as the contexts of records have them.

Design: an answer is found by the keys of the images and the text of the question, as two runs are compared, so a file
serves whatever its paths are. A question that a file answers twice has its first answer; two files that answer it
otherwise are refused, because it is unknown which of the two models was not trained on the image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from lookonce.datasets.curriculum.context import NOT_ANSWERED, ContextForm, Keys, KeysOf, as_shown, with_context
from lookonce.datasets.formats.checks import is_utf8
from lookonce.datasets.formats.record import Record, Turn
from lookonce.datasets.readers.text import read_jsonl
from lookonce.errors import RecordsError
from lookonce.text import count, listed, located, nfc, quoted

NUM_NAMED = 3


class _Row(BaseModel):
    """What is read of a row."""

    question: str
    predicted: str
    image_keys: Annotated[Keys, Field(min_length=1)]
    ended: str | None = None


ROW = TypeAdapter(_Row)


def with_given(
    records: Mapping[str, Sequence[Record]], form: ContextForm, paths: Sequence[Path], keys_of: KeysOf
) -> dict[str, list[Record]]:
    """The records of some splits with contexts: the answers in predictions files, or without any their own.

    Raises:
        RecordsError: the files lack answers, or are wrong.
    """
    if not paths:
        return {split: with_context(some, form, keys_of) for split, some in records.items()}
    given = GivenAnswers(paths, keys_of)
    found = {split: with_context(some, form, keys_of, given.turns) for split, some in records.items()}
    given.check()
    return found


class GivenAnswers:
    """The answers of some predictions files; notes which are asked for in vain."""

    def __init__(self, paths: Iterable[Path], keys_of: KeysOf) -> None:
        """Read the files.

        Raises:
            RecordsError: a file is missing, or a row is no prediction or contradicts another one.
        """
        self._paths, self._keys_of = [*paths], keys_of
        self._answers: dict[tuple[Keys, str], tuple[str, Path]] = {}
        self._missing: dict[tuple[Keys, str], str] = {}
        for path in self._paths:
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            for place, value in read_jsonl(path):
                row = _row(value, place)
                answer = as_shown(row.predicted, row.ended)
                asked = row.image_keys, nfc(row.question)
                known, other = self._answers.setdefault(asked, (answer, path))
                if nfc(known) != nfc(answer) and other != path:
                    raise RecordsError(
                        f"{place} answers {quoted(row.question)} about the same image otherwise than {other}; "
                        "name files of different images in `data.context.answers`"
                    )
        except FileNotFoundError:
            raise RecordsError(f"no predictions at {located(path)}; write them with: lookonce eval RUN") from None

    def turns(self, record: Record) -> list[Turn]:
        """The questions of a record with the given answers."""
        return [Turn(turn.question, self._find(record, turn.question)) for turn in record.turns]

    def _find(self, record: Record, question: str) -> str:
        asked = self._keys_of(record), nfc(question)
        if asked in self._answers:
            return self._answers[asked][0]
        self._missing[asked] = f"{quoted(question)} of {record.origin}"
        return NOT_ANSWERED

    def check(self) -> None:
        """Check that each answer that was asked for was found.

        Raises:
            RecordsError: counts and names the others.
        """
        if self._missing:
            named, files = listed([*self._missing.values()], NUM_NAMED), listed([str(path) for path in self._paths])
            raise RecordsError(
                f"`data.context.answers`: {files} lacks {count(len(self._missing), 'answer')} to earlier questions: "
                f"{named}; name all predictions of the training and validation records"
            )


def _row(value: object, place: str) -> _Row:
    try:
        row = ROW.validate_python(value)
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
