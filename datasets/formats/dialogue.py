"""Convert messages to a record, and a record to messages.

Design: strict, like everything that reads records. Nothing of a conversation is dropped or changed silently. A record
is refused if training would have to ignore something in it: a tool call, a video, or a message key that says what to
learn from the message. Keys beside the messages that have no such meaning are kept as metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lookonce.datasets.formats.checks import Row, answer_text, kind, need, optional_text, refuse_pixel_limits, text
from lookonce.datasets.formats.image_refs import Finder
from lookonce.datasets.formats.image_tags import MOVE_IMAGES, NAMING_TAG, TAG, check_num_tags, remove_tags
from lookonce.datasets.formats.record import Record, Turn
from lookonce.errors import RecordsError

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
ROLES = {"system": SYSTEM, "user": USER, "human": USER, "assistant": ASSISTANT, "gpt": ASSISTANT}
TOOLS = ("tool", "tools", "tool_call", "tool_response", "function", "function_call", "observation", "ipython")
UNSUPPORTED = {
    "video": "videos are not supported",
    "videos": "videos are not supported",
    "audio": "audio is not supported",
    "audios": "audio is not supported",
    "tools": "tool calls are not supported",
    "objects": "boxes of objects are not filled in; write them into the text",
}
"""Keys that change what a record means, and the reason why a record is refused if their value is not empty."""
OTHER_TAGS = {f"<{kind}>": UNSUPPORTED[kind] for kind in ("video", "audio")}


class Message(NamedTuple):
    """One message of a conversation."""

    role: str
    """SYSTEM, USER or ASSISTANT."""
    content: Any
    """The content as it was read; it is checked to be text when the record is made."""
    has_tags: bool = True
    """Whether `<image>` in the content is an image tag; if not, it is a word."""


def parse_role(value: Any, number: int, origin: str) -> str:
    """Return the role of message `number`.

    Raises:
        RecordsError: it is not one of `ROLES`.
    """
    if isinstance(value, str) and value in ROLES:
        return ROLES[value]
    if value in TOOLS:
        raise RecordsError(f"{origin}: message {number} has the role {value!r}; tool calls are not supported")
    raise RecordsError(f"{origin}: message {number} has the role {kind(value)}; expected one of {', '.join(ROLES)}")


def message_values(message: Any, number: int, keys: Sequence[str], origin: str) -> list[Any]:
    """Return the values of a message's keys.

    Raises:
        RecordsError: a key is missing, or the message has another key, which would be lost.
    """
    if not isinstance(message, dict):
        raise RecordsError(f"{origin}: message {number} must be an object with {list(keys)}, got {kind(message)}")
    refuse_pixel_limits(message, f"{origin}: message {number} has")
    if other := [key for key, value in message.items() if key not in keys and value not in (None, "", [])]:
        raise RecordsError(f"{origin}: message {number} has `{other[0]}`, which would be lost; expected {list(keys)}")
    return [need(message, key, f"{origin}: message {number}") for key in keys]


def image_references(row: Row, origin: str) -> list[Any]:
    """Return the image references under `image` or `images`, where there may be one or a list.

    Raises:
        RecordsError: both keys have a value.
    """
    found = [row[key] for key in ("image", "images") if row.get(key) not in (None, [])]
    if len(found) > 1:
        raise RecordsError(f"{origin}: both `image` and `images` have a value; expected one of the two keys")
    if not found:
        return []
    return found[0] if isinstance(found[0], list) else [found[0]]


def to_record(
    row: Row, keys: Sequence[str], messages: Sequence[Message], references: Sequence[Any], finder: Finder, origin: str
) -> Record:
    """Make a record of messages and image references; all keys of `row` but `keys`, system and images are metadata.

    Raises:
        RecordsError: user and assistant do not alternate, an answer is missing, an image tag is where no image can be
            shown, or something in `row` would be lost.
    """
    if unsupported := [key for key in UNSUPPORTED if row.get(key)]:
        raise RecordsError(f"{origin}: it has `{unsupported[0]}`; {UNSUPPORTED[unsupported[0]]}")
    messages, num_tags = _remove_tags(messages, origin)
    check_num_tags(num_tags, len(references), origin)
    system, turns = _to_turns(messages, optional_text(row.get("system"), "system", origin), origin)
    images = tuple(finder.find(reference, origin) for reference in references)
    known = {"system", "image", "images", *keys}
    return Record(images, turns, system, {key: value for key, value in row.items() if key not in known}, origin)


def _remove_tags(messages: Sequence[Message], origin: str) -> tuple[list[Message], int]:
    without, num_tags, after_question = [], 0, False
    for number, message in enumerate(messages, start=1):
        content = message.content if message.has_tags and isinstance(message.content, str) else ""
        if other := next((tag for tag in OTHER_TAGS if tag in content and message.role == USER), None):
            raise RecordsError(f"{origin}: {other} in message {number}; {OTHER_TAGS[other]}")
        if TAG in content and NAMING_TAG not in content:
            if message.role != USER or after_question:
                raise RecordsError(f"{origin}: {TAG} in message {number}, of the {message.role}; {MOVE_IMAGES}")
            question, num_tags = remove_tags(content, origin)
            message = message._replace(content=question)
        after_question = after_question or message.role == USER
        without.append(message)
    return without, num_tags


def _to_turns(messages: Sequence[Message], system: str | None, origin: str) -> tuple[str | None, tuple[Turn, ...]]:
    first_number = 1
    if messages and messages[0].role == SYSTEM:
        if system is not None:
            raise RecordsError(f"{origin}: two system texts, under `system` and in the first message; expected one")
        system, messages, first_number = optional_text(messages[0].content, "system", origin), messages[1:], 2
    for number, message in enumerate(messages, start=first_number):
        _check_role(message.role, number, is_question=(number - first_number) % 2 == 0, origin=origin)
    if not messages:
        raise RecordsError(f"{origin}: it has no messages; expected at least one question and answer")
    if len(messages) % 2:
        raise RecordsError(f"{origin}: the last question has no answer; training needs one")
    pairs = zip(messages[::2], messages[1::2], strict=True)
    return system, tuple(
        Turn(text(user.content, "question", origin), answer_text(assistant.content, "answer", origin))
        for user, assistant in pairs
    )


def _check_role(role: str, number: int, is_question: bool, origin: str) -> None:
    if role == SYSTEM:
        raise RecordsError(f"{origin}: message {number} is a system text; expected it first, or under `system`")
    if role != (USER if is_question else ASSISTANT):
        wanted = "a question of the user" if is_question else "an answer of the assistant"
        raise RecordsError(f"{origin}: message {number} has the role {role}; expected {wanted}, the two alternate")


def to_messages(system: str | None, turns: Sequence[Turn]) -> list[Message]:
    """Make messages of a conversation."""
    first = [] if system is None else [Message(SYSTEM, system)]
    pairs = [(Message(USER, turn.question), Message(ASSISTANT, turn.answer)) for turn in turns]
    return first + [message for pair in pairs for message in pair]
