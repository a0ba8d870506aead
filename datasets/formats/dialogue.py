"""Who speaks when: messages to a record, and a record to messages.

Design: strict, as everywhere with records. Nothing of a conversation is dropped or changed in silence: what a training
would have to leave out, a tool call or a video, a key of a message that says what to learn from it, refuses the record.
Keys beside the messages that mean nothing here are kept as metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lookonce.datasets.formats.checks import Row, kind, need, optional_text, text
from lookonce.datasets.formats.image_refs import Finder
from lookonce.datasets.formats.image_tags import MARK, WHERE, check_marks, without_marks
from lookonce.datasets.formats.record import Record, Turn
from lookonce.errors import RecordsError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = {"system": SYSTEM, "user": USER, "human": USER, "assistant": ASSISTANT, "gpt": ASSISTANT}
TOOLS = ("tool", "tools", "tool_call", "tool_response", "function", "function_call", "observation", "ipython")
UNSUPPORTED = {
    "video": "videos are not trained on",
    "videos": "videos are not trained on",
    "audio": "sound is not trained on",
    "audios": "sound is not trained on",
    "tools": "tool calls are not trained on",
    "objects": "boxes of objects are not filled in; write them into the text",
}
"""Keys that change what a record means, and why they are refused where something stands under them."""


class Speech(NamedTuple):
    """One message."""

    role: str
    """SYSTEM, USER or ASSISTANT."""
    content: Any
    """Text, if it is as it should be."""
    has_marks: bool = True
    """Whether `<image>` in it stands for an image, and is not a word."""


def role_of(value: Any, number: int, origin: str) -> str:
    """Who speaks in message `number`.

    Raises:
        RecordsError: nobody that a training could have.
    """
    if isinstance(value, str) and value in ROLES:
        return ROLES[value]
    if value in TOOLS:
        raise RecordsError(f"{origin}: message {number} is of {value!r}; tool calls are not trained on")
    raise RecordsError(f"{origin}: message {number} is of {kind(value)}; expected one of {', '.join(ROLES)}")


def content_of(message: Any, number: int, keys: Sequence[str], origin: str) -> list[Any]:
    """The values of a message's keys, and nothing else in it.

    Raises:
        RecordsError: one is missing, or there is another, which would be lost.
    """
    if not isinstance(message, dict):
        raise RecordsError(f"{origin}: message {number} must be an object with {list(keys)}, got {kind(message)}")
    if other := [key for key, value in message.items() if key not in keys and value not in (None, "", [])]:
        raise RecordsError(f"{origin}: message {number} has `{other[0]}`, which would be lost; expected {list(keys)}")
    return [need(message, key, f"{origin}: message {number}") for key in keys]


def image_references(row: Row, origin: str) -> list[Any]:
    """What stands under `image` or `images`: one or a list.

    Raises:
        RecordsError: something stands under both.
    """
    found = [row[key] for key in ("image", "images") if row.get(key) not in (None, [])]
    if len(found) > 1:
        raise RecordsError(f"{origin}: images under `image` and under `images`; expected one of the two")
    if not found:
        return []
    return found[0] if isinstance(found[0], list) else [found[0]]


def to_record(
    row: Row, keys: Sequence[str], speeches: Sequence[Speech], references: Sequence[Any], finder: Finder, origin: str
) -> Record:
    """A record of messages and images; what stands in `row` beside `keys`, `system` and images is metadata.

    Raises:
        RecordsError: they do not take turns, an answer is missing, an image is marked where none can be shown, or
            something in `row` would have to be left out.
    """
    if unsupported := [key for key in UNSUPPORTED if row.get(key)]:
        raise RecordsError(f"{origin}: it has `{unsupported[0]}`, and {UNSUPPORTED[unsupported[0]]}")
    speeches, num_marks = _take_out_marks(speeches, origin)
    check_marks(num_marks, len(references), origin)
    system, turns = _to_turns(speeches, optional_text(row.get("system"), "system", origin), origin)
    images = tuple(finder.find(reference, origin) for reference in references)
    known = {"system", "image", "images", *keys}
    return Record(images, turns, system, {key: value for key, value in row.items() if key not in known}, origin)


def _take_out_marks(speeches: Sequence[Speech], origin: str) -> tuple[list[Speech], int]:
    kept, num_marks, was_asked = [], 0, False
    for number, speech in enumerate(speeches, start=1):
        if speech.has_marks and isinstance(speech.content, str) and MARK in speech.content:
            if speech.role != USER or was_asked:
                raise RecordsError(f"{origin}: {MARK} in message {number}, of the {speech.role}; {WHERE}")
            question, num_marks = without_marks(speech.content, origin)
            speech = speech._replace(content=question)
        was_asked = was_asked or speech.role == USER
        kept.append(speech)
    return kept, num_marks


def _to_turns(speeches: Sequence[Speech], system: str | None, origin: str) -> tuple[str | None, tuple[Turn, ...]]:
    first_number = 1
    if speeches and speeches[0].role == SYSTEM:
        if system is not None:
            raise RecordsError(f"{origin}: two system texts, under `system` and in the first message; expected one")
        system, speeches, first_number = optional_text(speeches[0].content, "system", origin), speeches[1:], 2
    for number, speech in enumerate(speeches, start=first_number):
        _check_role(speech.role, number, is_question=(number - first_number) % 2 == 0, origin=origin)
    if not speeches:
        raise RecordsError(f"{origin}: it has no messages; expected at least one question and answer")
    if len(speeches) % 2:
        raise RecordsError(f"{origin}: the last question has no answer; training needs one")
    pairs = zip(speeches[::2], speeches[1::2], strict=True)
    return system, tuple(
        Turn(text(asked.content, "question", origin), text(said.content, "answer", origin)) for asked, said in pairs
    )


def _check_role(role: str, number: int, is_question: bool, origin: str) -> None:
    if role == SYSTEM:
        raise RecordsError(f"{origin}: message {number} is a system text; expected it first, or under `system`")
    if role != (USER if is_question else ASSISTANT):
        wanted = "a question of the user" if is_question else "an answer of the assistant"
        raise RecordsError(f"{origin}: message {number} is of the {role}; expected {wanted} there, in turns")


def to_speeches(system: str | None, turns: Sequence[Turn]) -> list[Speech]:
    """A conversation as messages."""
    first = [] if system is None else [Speech(SYSTEM, system)]
    pairs = [(Speech(USER, turn.question), Speech(ASSISTANT, turn.answer)) for turn in turns]
    return first + [speech for pair in pairs for speech in pair]
