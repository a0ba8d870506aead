"""All record formats by name, and which one a record has.

Design: the format of a file is recognised by the keys of its first record, and all other records must be of the same
kind. So a file that changes its format halfway is detected, and no record needs a guess. Formats that differ only in
how they are written are read as one kind: LLaVA and ShareGPT, the three kinds of messages, and the project's own two,
which may be mixed in one file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lookonce.datasets.formats.alpaca import read_alpaca, write_alpaca
from lookonce.datasets.formats.checks import Row, check_record, keys_of, kind, refuse_pixel_limits
from lookonce.datasets.formats.coerce import coerce_answers
from lookonce.datasets.formats.image_refs import Finder
from lookonce.datasets.formats.image_tags import read_marks
from lookonce.datasets.formats.llava import read_conversations, write_llava, write_sharegpt
from lookonce.datasets.formats.messages import read_messages, write_messages, write_openai, write_parts
from lookonce.datasets.formats.native import read_canonical, read_flat, write_canonical, write_flat
from lookonce.datasets.formats.record import Record
from lookonce.datasets.formats.unanswered import add_placeholder, without_placeholder
from lookonce.datasets.readers.file_kind import records_inside
from lookonce.datasets.readers.image_column import QUESTION_NAMES
from lookonce.errors import RecordsError

FormatName = Literal["canonical", "flat", "llava", "sharegpt", "alpaca", "messages", "parts", "openai"]
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
Read = Callable[[Row, Finder, str], Record]
Write = Callable[[Record, list[str]], Row]
EXPECTED_KEYS = (
    "the key `turns` (canonical format) or `question` (flat format), got {keys}; other formats have `conversations` "
    "(LLaVA, ShareGPT), `messages`, or `instruction` and `output` (Alpaca)"
)


@dataclass(frozen=True)
class RecordFormat:
    """A record format: how to read a row as a record, and how to write a record as a row."""

    name: FormatName
    kind: str
    """Formats of one kind are read by the same rules, and one file may mix them."""
    read: Read
    write: Write
    """Takes the record and the names of its images; raises RecordsError if the format cannot hold the record."""


FORMATS: dict[FormatName, RecordFormat] = {
    format.name: format
    for format in (
        RecordFormat("canonical", "native", read_canonical, write_canonical),
        RecordFormat("flat", "native", read_flat, write_flat),
        RecordFormat("llava", "conversations", read_conversations, write_llava),
        RecordFormat("sharegpt", "conversations", read_conversations, write_sharegpt),
        RecordFormat("alpaca", "alpaca", read_alpaca, write_alpaca),
        RecordFormat("messages", "messages", read_messages, write_messages),
        RecordFormat("parts", "messages", read_messages, write_parts),
        RecordFormat("openai", "messages", read_messages, write_openai),
    )
}


def read_row(format: FormatName, row: Row, finder: Finder, origin: str) -> Record:
    """The `completed` record of a row in a format.

    Raises:
        RecordsError: the row does not follow the format, or no training can use it.
    """
    return completed(FORMATS[format].read(row, finder, origin), lambda name: finder.find(name, origin))


def completed(record: Record, find: Callable[[str], Path]) -> Record:
    """A record from any source with the image marks of its texts read, and checked; `find` gives the path of a name.

    Raises:
        RecordsError: no training can use it.
    """
    record = read_marks(record, find)
    check_record(record)
    return record


def format_of(row: Row) -> FormatName | None:
    """Return the format of a record, recognised by its keys, or None."""
    if "turns" in row:
        return "canonical"
    if "question" in row and "image_filename" in row:
        return "flat"
    if "conversations" in row:
        return "sharegpt" if "images" in row else "llava"
    if "messages" in row:
        return _format_of_messages(row)
    if "instruction" in row and "output" in row:
        return "alpaca"
    return "flat" if any(name in row for name in QUESTION_NAMES) else None


def _format_of_messages(row: Row) -> FormatName:
    messages = row["messages"] if isinstance(row["messages"], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts):
        return "openai"
    if any(isinstance(content, list) for content in contents):
        return "parts"
    return "messages" if "images" in row else "openai"


class Reader:
    """Reads the records of one file, which must all have formats of one kind."""

    def __init__(
        self, finder: Finder, format: FormatName | None = None, *, coerce: bool = False, unanswered: bool = False
    ) -> None:
        """Without `format`, the first record decides. `coerce` reads numbers and booleans as answers.

        With `unanswered` the last question of a record may lack its answer, which is then empty.
        """
        self.finder, self.coerce, self.unanswered, self.num_coerced = finder, coerce, unanswered, 0
        self.format: FormatName | None = format
        """The format of the file; None until the first record is read, unless it was given."""
        self._given = format

    def read(self, value: Any, origin: str) -> Record:
        """Return the record that a row of the file holds.

        Raises:
            RecordsError: the row does not follow the format; says what was expected.
        """
        if not isinstance(value, dict):
            raise RecordsError(f"{origin}: expected a JSON object, got {kind(value)}")
        if self._given is not None:
            return self._read_as(FORMATS[self._given], value, origin)
        found = format_of(value)
        self.format = self.format or found
        if found is None or self.format is None:
            inner = records_inside(value)
            hint = f"; its records are under `{inner}`: write one a line, with: jq -c '.{inner}[]' FILE > NEW.jsonl"
            raise RecordsError(f"{origin}: expected {self._expected(value)}{hint if inner else ''}")
        if FORMATS[found].kind != FORMATS[self.format].kind:
            raise RecordsError(
                f"{origin}: expected a record in the format {self.format}, like the first one, got the format "
                f"{found}; keep them in two files"
            )
        return self._read_as(FORMATS[found], value, origin)

    def _read_as(self, format: RecordFormat, value: Row, origin: str) -> Record:
        refuse_pixel_limits(value, f"{origin}: it has", ("min_pixels", "max_pixels"))
        if self.coerce:
            self.num_coerced += coerce_answers(value, format.kind)
        is_open = self.unanswered and add_placeholder(value, format.kind)
        record = read_row(format.name, value, self.finder, origin)
        return without_placeholder(record) if is_open else record

    def _expected(self, value: Row) -> str:
        if self.format is None or FORMATS[self.format].kind == "native":
            return EXPECTED_KEYS.format(keys=keys_of(value))
        return f"a record in the format {self.format}, like the first one, got {kind(value)}"
