"""All record formats by name, which one a record has, and the project's own two, canonical and flat.

    {"images": ["images/a.jpg"], "turns": [{"question": "Is there text?", "answer": "yes"}],
     "system": "Answer briefly.", "metadata": {"source": "polyps"}}

    {"image_id": "a", "image_filename": "a.jpg", "question": "Is there text?", "answer": "yes", "stage": 1}

Canonical can hold every record. Flat is one question about one image, and all other keys are metadata, so it is also
the format of tables. Flat accepts the usual names of columns, `img_id` with a file of that name beside the records or
in `images/` there, and a list under `answers`: its most frequent answer is trained on, and each of them is right.

Design: the keys of the first record tell the format of a file, and all other records must be of the same kind, so a
file that changes its format halfway is an error. Formats that differ only in how they are written are of one kind:
LLaVA and ShareGPT, the three kinds of messages, and the project's own two.

Answers are text: 2 and 2.0 are different answers. A number or a boolean is an error, unless the user asks to read it as
the text that JSON has for it. NaN and null are missing values and stay errors. The answer to the last question of a
record may be unknown (`Finder.is_open`), and is then empty; earlier answers are part of the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lookonce.datasets.formats.conversations import (
    read_alpaca,
    read_conversations,
    read_messages,
    write_alpaca,
    write_llava,
    write_messages,
    write_openai,
    write_parts,
    write_sharegpt,
)
from lookonce.datasets.formats.image_references import Finder, check_marks
from lookonce.datasets.formats.record import (
    ANSWER_NAMES,
    IMAGE_ID_NAMES,
    IMAGE_NAMES,
    QUESTION_NAMES,
    Record,
    Row,
    Turn,
    as_list,
    check_record,
    is_number,
    items,
    keys_of,
    kind,
    need,
    refuse_pixel_limits,
    shown,
    text,
)
from lookonce.errors import RecordsError

RANKS = {name: rank for rank, name in enumerate(IMAGE_NAMES)}
"""The first image column counts, and embedded bytes before names."""


def read_canonical(row: Row, finder: Finder, origin: str) -> Record:
    """Read a canonical record; a key that is not part of the format is an error."""
    unknown = sorted(set(row) - {"images", "turns", "system", "metadata"})
    if unknown:
        raise RecordsError(f"{origin}: unknown key `{unknown[0]}`; put extra keys under `metadata`")
    turns = items(need(row, "turns", origin), "turns", origin)
    if not turns:
        raise RecordsError(f"{origin}: `turns` is empty; expected at least one question and answer")
    system, metadata = row.get("system"), row.get("metadata")
    if not isinstance(metadata, dict | None):
        raise RecordsError(f"{origin}: `metadata` must be an object, got {kind(metadata)}")
    return Record(
        images=tuple(finder.find(name, origin) for name in items(row.get("images", []), "images", origin)),
        turns=tuple(_turn(turn, finder, origin, is_last=turn is turns[-1]) for turn in turns),
        system=None if system is None else text(system, "system", origin),
        metadata=_with_references(metadata or {}, finder, origin),
        origin=origin,
    )


def write_canonical(record: Record, images: list[str]) -> Row:
    turns = [{"question": turn.question, "answer": turn.answer} for turn in record.turns]
    return {"images": images, "turns": turns, "system": record.system, "metadata": dict(record.metadata)}


def read_flat(row: Row, finder: Finder, origin: str) -> Record:
    """Read a record of one question about one image, or about a list of them."""
    question_key = first_of(row, QUESTION_NAMES) or need(row, QUESTION_NAMES[0], origin)
    answer_key = first_of(row, ANSWER_NAMES) or ANSWER_NAMES[0]
    is_open = finder.is_open(row.get(answer_key))
    value = None if is_open else need(row, answer_key, origin)
    named = [(isinstance(as_list(row[key])[0], str), RANKS[key], key) for key in row if key in RANKS and row[key]]
    key = min(named)[2] if named else None
    images = (
        [finder.find(reference, origin) for reference in as_list(row[key])] if key else [_by_id(row, finder, origin)]
    )
    question = text(row[question_key], question_key, origin)
    answer, references = ("", {}) if is_open else _answers(value, answer_key, finder, origin)
    metadata = references | {name: value for name, value in row.items() if name not in (key, question_key, answer_key)}
    metadata = _with_references(metadata, finder, origin)
    return Record(tuple(images), (Turn(question, answer),), metadata=metadata, origin=origin)


def first_of(row: Row, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in row), None)


def _by_id(row: Row, finder: Finder, origin: str) -> Path:
    """The image of a row without its file name."""
    key = first_of(row, IMAGE_ID_NAMES)
    if key and (image := finder.find_id(text(str(row[key]), key, origin))):
        return image
    called = f"no file in the image root is called {shown(str(row[key]))}" if key else ""
    hint = f"; lookonce data prepare finds images by `{key}`, too; {called}" if key else ""
    if empty := first_of(row, IMAGE_NAMES):
        hint = f"; `{empty}` is empty{hint}"
    raise RecordsError(f"{origin}: expected the key `{IMAGE_NAMES[0]}`, got {keys_of(row)}{hint}")


def _answers(value: Any, key: str, finder: Finder, origin: str) -> tuple[str, dict[str, Any]]:
    """The answer to train on, and the references if there are several answers."""
    if not isinstance(value, list) or key == ANSWER_NAMES[0]:
        return finder.answer(value, key, origin), {}
    answers = [finder.answer(answer, key, origin) for answer in value]
    if not answers:
        raise RecordsError(f"{origin}: `{key}` must be text that is not empty, got an empty list")
    ordered = [answer for answer, _ in Counter(answers).most_common()]
    return ordered[0], {"references": ordered} if len(ordered) > 1 else {}


def _with_references(metadata: dict[str, Any], finder: Finder, origin: str) -> dict[str, Any]:
    """The metadata with the numbers among several correct answers as text, if they may be numbers."""
    references = metadata.get("references")
    if not (finder.coerce and isinstance(references, list)):
        return metadata
    texts = [finder.answer(answer, "references", origin) if is_number(answer) else answer for answer in references]
    return metadata | {"references": texts}


def write_flat(record: Record, images: list[str]) -> Row:
    """Write one question about one image, and metadata as further keys; raises RecordsError if the record has more."""
    for number, unit in ((len(images), "image"), (len(record.turns), "question")):
        if number != 1:
            raise RecordsError(f"it holds one {unit} a record, and this one has {number}")
    if record.system is not None:
        raise RecordsError("it cannot hold a system text")
    turn = {"question": record.turns[0].question, "answer": record.turns[0].answer}
    return {"image_filename": images[0], **turn} | dict(record.metadata)


def _turn(value: Any, finder: Finder, origin: str, *, is_last: bool) -> Turn:
    is_open = is_last and isinstance(value, dict) and finder.is_open(value.get("answer"))
    if not isinstance(value, dict) or value.keys() | ({"answer"} if is_open else set()) != {"question", "answer"}:
        raise RecordsError(f"{origin}: a turn must be an object with `question` and `answer`, got {kind(value)}")
    question = text(value["question"], "question", origin)
    return Turn(question, "" if is_open else finder.answer(value["answer"], "answer", origin))


FormatName = Literal["canonical", "flat", "llava", "sharegpt", "alpaca", "messages", "parts", "openai"]
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
Read = Callable[[Row, Finder, str], Record]
Write = Callable[[Record, list[str]], Row]
EXPECTED = (
    "the key `turns` (canonical format) or `question` (flat format), got {}; other formats have `conversations` "
    "(LLaVA, ShareGPT), `messages`, or `instruction` and `output` (Alpaca)"
)


@dataclass(frozen=True)
class RecordFormat:
    """A record format: how to read a row as a record, and how to write a record as a row."""

    kind: str
    """Formats of one kind are read by the same rules, and one file may mix them."""
    read: Read
    write: Write
    """Takes the record and the names of its images; raises RecordsError if the format cannot hold the record."""


FORMATS: dict[FormatName, RecordFormat] = {
    "canonical": RecordFormat("native", read_canonical, write_canonical),
    "flat": RecordFormat("native", read_flat, write_flat),
    "llava": RecordFormat("conversations", read_conversations, write_llava),
    "sharegpt": RecordFormat("conversations", read_conversations, write_sharegpt),
    "alpaca": RecordFormat("alpaca", read_alpaca, write_alpaca),
    "messages": RecordFormat("messages", read_messages, write_messages),
    "parts": RecordFormat("messages", read_messages, write_parts),
    "openai": RecordFormat("messages", read_messages, write_openai),
}


def read_row(format: FormatName, row: Row, finder: Finder, origin: str) -> Record:
    """The `checked` record of a row in a format; raises RecordsError if the row does not follow the format."""
    return checked(FORMATS[format].read(row, finder, origin))


def checked(record: Record) -> Record:
    """A record from any source; raises RecordsError, which names what is wrong, if no training can use it."""
    check_marks(record)
    check_record(record)
    return record


def format_of(row: Row) -> FormatName | None:
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

    def __init__(self, finder: Finder, format: FormatName | None = None) -> None:
        """Without `format`, the first record decides."""
        self.finder = finder
        self.format: FormatName | None = format
        """The format of the file; None until the first record is read, unless it was given."""
        self._given = format

    def read(self, value: Any, origin: str) -> Record:
        """The record that a row of the file holds; raises RecordsError if the row does not follow the format."""
        if not isinstance(value, dict):
            raise RecordsError(f"{origin}: expected a JSON object, got {kind(value)}")
        format = self._given or format_of(value)
        self.format = self.format or format
        if format is None or self.format is None:
            is_first = self.format is None or FORMATS[self.format].kind == "native"
            like_the_first = f"a record in the format {self.format}, like the first one, got {kind(value)}"
            raise RecordsError(f"{origin}: expected {EXPECTED.format(keys_of(value)) if is_first else like_the_first}")
        if FORMATS[format].kind != FORMATS[self.format].kind:
            raise RecordsError(
                f"{origin}: expected a record in the format {self.format}, like the first one, got the format "
                f"{format}; keep them in two files"
            )
        refuse_pixel_limits(value, f"{origin}: it has", ("min_pixels", "max_pixels"))
        return read_row(format, value, self.finder, origin)
