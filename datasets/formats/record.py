"""A record: its data classes, the usual names of its keys, and the checks that all record formats share.

A record that passes `check_record` can be tokenised, compared and written to any file, whatever its format was. NaN and
control characters pass.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lookonce.errors import RecordsError
from lookonce.families.family import CONTROL_TOKENS
from lookonce.text import listed, nfc, one_line

IMAGE_NAMES = (
    *("image_filename", "file_name", "image_path", "image", "filename", "img", "img_path", "image_file", "img_file"),
    *("image_name", "img_name", "picture", "photo", "images"),
)
"""Names of the column with the image of a row, its file name or its bytes, or with a list of them."""
IMAGE_ID_NAMES = ("img_id", "image_id")
"""Names of the column with the dataset's name for the image, after which its file may be named."""
QUESTION_NAMES = ("question", "query", "problem", "prompt")
ANSWER_NAMES = ("answer", "answers", "label", "response", "solution", "output", "target", "ground_truth")
"""Names of the columns of a table of questions. Of each kind the first one counts that a row has."""
CONVERSATION_NAMES = ("turns", "conversations", "messages", "instruction")
"""One of these keys is in every format but that of tables."""
KEYS = {*IMAGE_NAMES, *IMAGE_ID_NAMES, *QUESTION_NAMES, *ANSWER_NAMES, *CONVERSATION_NAMES}
"""The keys by which records are recognised."""


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str

    @property
    def in_nfc(self) -> Turn:
        """The turn with its texts in Unicode normal form NFC, in which texts are compared."""
        return Turn(nfc(self.question), nfc(self.answer))


@dataclass(frozen=True)
class Context:
    """Answers to earlier questions about a record's images, which its prompt contains."""

    answers: tuple[Turn, ...]
    text: str | None = None
    """The record's first question with these answers in it; None if they are turns before it."""


@dataclass(frozen=True)
class Record:
    """A conversation of one or more turns about one image, several or none."""

    images: tuple[Path, ...]
    """Absolute, normalized paths, except for `root/../a.jpg`, which leads out of the root and is never opened."""
    turns: tuple[Turn, ...]
    system: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""
    """Where the record was read from, such as "train.jsonl:12"; used in messages."""
    context: Context | None = None
    """What `data.context` adds to the prompt; no records file has it."""

    @property
    def known(self) -> tuple[Turn, ...]:
        """The answers of the context."""
        return self.context.answers if self.context else ()

    @property
    def shown(self) -> Record:
        """The record with the turns of the prompt, in which the context has become texts or turns."""
        if self.context is None:
            return self
        if self.context.text is None:
            return replace(self, turns=(*self.known, *self.turns), context=None)
        first, *later = self.turns
        return replace(self, turns=(replace(first, question=self.context.text), *later), context=None)

    @property
    def num_given(self) -> int:
        """The number of turns in `shown` that are context, whose answers are not trained on."""
        return len(self.known) if self.context and self.context.text is None else 0

    def with_system(self, system: str | None) -> Record:
        """The record with this system text, unless it has one of its own."""
        return self if system is None or self.system is not None else replace(self, system=system)

    @property
    def references(self) -> tuple[str, ...]:
        """All correct answers of a record with one turn, its own first: a list of texts in its metadata that has it.

        Any other value under the metadata key `references` is ignored.
        """
        texts = self.metadata.get("references")
        if len(self.turns) != 1 or not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return ()
        own = self.turns[0].in_nfc.answer.strip()
        others = [text for text in texts if nfc(text).strip() != own]
        return (self.turns[0].answer, *others) if len(others) < len(texts) else ()


def rename_advice(names: Iterable[str]) -> str:
    """What to say of names that are usual ones but for capitals, spaces and hyphens; empty if there are none."""
    usual = {name: re.sub(r"[\s-]+", "_", name.strip().lower()) for name in names if name not in KEYS}
    renamed = [f"`{one_line(name)}` to `{key}`" for name, key in usual.items() if key in KEYS]
    return f"; rename {listed(renamed)}" if renamed else ""


Row = dict[str, Any]
"""One record as a file stores it: a JSON object, a CSV row or a parquet row."""
PIXEL_LIMITS = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")
"""Keys of Qwen's messages for the size of one image."""
CONTROL_TOKEN = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
MAX_DEPTH = 50
"""The deepest nesting of metadata; Python's own limit when it writes JSON is several hundred."""
MAX_SHOWN = 200
"""A message shows this many characters of a value; an embedded image has a million."""


def text(value: Any, key: str, origin: str) -> str:
    """The value, if it is a text that is not empty and can be encoded as UTF-8; raises RecordsError if not."""
    if not isinstance(value, str) or not value.strip():
        raise RecordsError(f"{origin}: `{key}` must be text that is not empty, got {shown(value)}")
    if not value.isascii() and not is_utf8(value):
        raise _not_utf8(f"`{key}`", value, origin)
    return value


def _not_utf8(name: str, value: str, origin: str) -> RecordsError:
    return RecordsError(f"{origin}: {name} holds half a character (a lone surrogate): {ascii(value)[:MAX_SHOWN]}")


def check_record(record: Record) -> None:
    """Check all texts of a record, its metadata and its image paths.

    Raises:
        RecordsError: a text contains a special token of a model, metadata is nested too deeply, or something cannot be
            encoded as UTF-8.
    """
    origin = record.origin
    for name, _, content in texts(record) if may_have_marks(record) else ():
        if "<" in content and (token := CONTROL_TOKEN.search(content)):
            raise RecordsError(
                f"{origin}: `{name}` contains {token[0]}, a special token of the model, got {shown(content)}; remove "
                "it, since it would act as one"
            )
    for path in (origin, *map(str, record.images)):
        if not path.isascii() and not is_utf8(path):
            raise RecordsError(f"{origin}: the path {ascii(path)} is not UTF-8, in which results name it; rename it")
    check_values(record.metadata, origin)


def may_have_marks(record: Record) -> bool:
    """Whether a text has a character with which image marks and special tokens begin; most records have none."""
    whole = "".join([content for turn in record.turns for content in (turn.question, turn.answer)])
    if record.system or "references" in record.metadata:
        whole += "".join([record.system or "", *record.references])
    return "<" in whole or "[" in whole


def texts(record: Record) -> Iterator[tuple[str, int, str]]:
    """The texts that are tokenised, or compared with what a model writes: the kind, the number of the turn, the text.

    Turns are counted from 1; 0 stands for the texts of the whole record.
    """
    if record.system:
        yield "system", 0, record.system
    for number, turn in enumerate(record.turns, start=1):
        yield "question", number, turn.question
        yield "answer", number, turn.answer
    for reference in record.references:
        yield "references", 0, reference


def check_values(values: Mapping[str, Any], origin: str) -> None:
    """Raise RecordsError if values, such as metadata, are nested too deeply, or have bytes or half a character."""
    waiting: list[tuple[str, Any, int]] = [("metadata", values, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, str):
            if not value.isascii() and not is_utf8(value):
                raise _not_utf8(f"`{name}`", value, origin)
        elif isinstance(value, bytes):
            raise RecordsError(f"{origin}: `{name}` holds bytes, which metadata cannot have; leave it out")
        elif depth > MAX_DEPTH:
            raise RecordsError(f"{origin}: `{name[:MAX_SHOWN]}` is nested more than {MAX_DEPTH} deep; leave it out")
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if not is_utf8(key):
                    raise _not_utf8(f"a key of `{name}`", key, origin)
                waiting.append((key if depth == 0 else f"{name}.{key}", item, depth + 1))
        elif isinstance(value, list):
            waiting += [(name, item, depth + 1) for item in value if type(item) not in (int, float)]


def refuse_pixel_limits(value: Any, where: str, keys: Sequence[str] = PIXEL_LIMITS) -> None:
    """Refuse an object with sizes of single images; `where` begins the message. Raises RecordsError."""
    if isinstance(value, dict) and (limits := [key for key in keys if value.get(key) is not None]):
        raise RecordsError(
            f"{where} `{limits[0]}`, which would be lost, since all images of a run have the same limits; remove it "
            "from the records, and set `cache.min_pixels` or `cache.max_pixels` in the run file"
        )


def is_number(value: Any) -> bool:
    """Whether it is a number or a boolean of JSON; NaN and infinity are not."""
    return isinstance(value, bool | int) or isinstance(value, float) and math.isfinite(value)


def optional_text(value: Any, key: str, origin: str) -> str | None:
    """Like `text`, but None for None and "", which some formats write instead of leaving the key out."""
    return None if value is None or value == "" else text(value, key, origin)


def items(value: Any, key: str, origin: str) -> list[Any]:
    """The value, if it is a list; raises RecordsError if not."""
    if not isinstance(value, list):
        raise RecordsError(f"{origin}: `{key}` must be a list, got {kind(value)}")
    return value


def as_list(value: Any) -> list[Any]:
    """A list as it is, and any other value as a list of one."""
    return value if isinstance(value, list) else [value]


def need(row: Row, key: str, origin: str) -> Any:
    """The value of a key; raises RecordsError if it is missing."""
    if key not in row:
        raise RecordsError(f"{origin}: expected the key `{key}`, got {keys_of(row)}")
    return row[key]


def keys_of(row: Row) -> str:
    """The keys of a row in a message, with the names of those to rename."""
    return f"{shown(sorted(row))}{rename_advice(row)}"


def is_utf8(value: str) -> bool:
    """Whether a text can be encoded as UTF-8; one with a lone surrogate, which JSON escapes can produce, cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind(value: Any) -> str:
    """Describe a value in a message: an object by its keys, a list as "a list", anything else by its repr."""
    if isinstance(value, dict):
        return f"an object with {sorted(value)}"
    return "a list" if isinstance(value, list) else shown(value)


def shown(value: Any) -> str:
    """Return the repr of a value, cut to `MAX_SHOWN` characters."""
    whole = repr(value)
    return whole if len(whole) <= MAX_SHOWN else f"{whole[:MAX_SHOWN]}... ({len(whole):,} characters)"
