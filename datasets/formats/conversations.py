"""The record formats of other programs: conversations as messages, or as an instruction and its output.

LLaVA, and ShareGPT as LLaMA-Factory writes it, which has all images in a list, `images`, and optionally a `system`
text. One function reads both: images under either key, roles as `from` and `value` or as `role` and `content`.

    {"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nIs there text?"},
     {"from": "gpt", "value": "yes"}]}

Messages: the first of these is the format of ms-swift and LLaMA-Factory, the second of Hugging Face, TRL and Axolotl,
the third of OpenAI. A file may mix them. A part `{"type": "image"}` without a path refers to the next of `images`, or
to the one with its `index`, as in TRL's datasets. In content parts `<image>` is a word; text parts are joined.

    {"messages": [{"role": "user", "content": "<image>Is there text?"}, {"role": "assistant", "content": "yes"}],
     "images": ["/data/a.jpg"]}

    {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.jpg"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]}

    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///data/a.jpg"}}, ...

Alpaca, as LLaMA-Factory writes it: the question is the instruction, and after a line break the input if it is not
empty. Earlier turns are in `history`, a list of pairs; the image tags are then in the first of them.

    {"instruction": "<image>Is there text?", "input": "", "output": "yes", "images": ["a.jpg"]}

Design: nothing of a conversation is dropped or changed silently. A record with a tool call, a video, or a message key
that says what to learn from the message is refused. Other keys beside the messages are metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from lookonce.datasets.formats.image_references import MOVE_IMAGES, TAG, Finder, add_tags, check_num_tags, remove_tags
from lookonce.datasets.formats.record import (
    Record,
    Row,
    Turn,
    is_number,
    items,
    kind,
    need,
    optional_text,
    refuse_pixel_limits,
    shown,
    text,
)
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
    role: str
    """SYSTEM, USER or ASSISTANT."""
    content: Any
    """The content as it was read; it is checked to be text when the record is made."""
    has_tags: bool = True
    """Whether `<image>` in the content is an image tag; if not, it is a word."""


def read_message(message: Any, where: str, keys: tuple[str, str] = ("role", "content")) -> Message:
    """A message with these keys for its role and content; `where` names it: "train.jsonl:1: message 2".

    Raises:
        RecordsError: a key is missing, its role is unknown, or it has another key, which would be lost.
    """
    if not isinstance(message, dict):
        raise RecordsError(f"{where} must be an object with {list(keys)}, got {kind(message)}")
    refuse_pixel_limits(message, f"{where} has")
    if unknown := [key for key, value in message.items() if key not in keys and value not in (None, "", [])]:
        raise RecordsError(f"{where} has `{unknown[0]}`, which would be lost; expected {list(keys)}")
    role, content = (need(message, key, where) for key in keys)
    if role in TOOLS:
        raise RecordsError(f"{where} has the role {role!r}; tool calls are not supported")
    if not isinstance(role, str) or role not in ROLES:
        raise RecordsError(f"{where} has the role {kind(role)}; expected one of {', '.join(ROLES)}")
    return Message(ROLES[role], content)


def image_references(row: Row, origin: str) -> list[Any]:
    """The image references under `image` or `images`, one or a list; raises RecordsError if both keys have a value."""
    values = [row[key] for key in ("image", "images") if row.get(key) not in (None, [])]
    if len(values) > 1:
        raise RecordsError(f"{origin}: both `image` and `images` have a value; expected one of the two keys")
    if not values:
        return []
    return values[0] if isinstance(values[0], list) else [values[0]]


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
    system, turns = _to_turns(messages, optional_text(row.get("system"), "system", origin), finder, origin)
    images = tuple(finder.find(reference, origin) for reference in references)
    known = {"system", "image", "images", *keys}
    return Record(images, turns, system, {key: value for key, value in row.items() if key not in known}, origin)


def _remove_tags(messages: Sequence[Message], origin: str) -> tuple[list[Message], int]:
    without, num_tags, after_question = [], 0, False
    for number, message in enumerate(messages, start=1):
        content = message.content if message.has_tags and isinstance(message.content, str) else ""
        if foreign_tag := next((tag for tag in OTHER_TAGS if tag in content and message.role == USER), None):
            raise RecordsError(f"{origin}: {foreign_tag} in message {number}; {OTHER_TAGS[foreign_tag]}")
        if TAG in content:
            if message.role != USER or after_question:
                raise RecordsError(f"{origin}: {TAG} in message {number}, of the {message.role}; {MOVE_IMAGES}")
            question, num_tags = remove_tags(content, origin)
            message = message._replace(content=question)
        after_question = after_question or message.role == USER
        without.append(message)
    return without, num_tags


def _to_turns(
    messages: Sequence[Message], system: str | None, finder: Finder, origin: str
) -> tuple[str | None, tuple[Turn, ...]]:
    first_number = 1
    if messages and messages[0].role == SYSTEM:
        if system is not None:
            raise RecordsError(f"{origin}: two system texts, under `system` and in the first message; expected one")
        system, messages, first_number = optional_text(messages[0].content, "system", origin), messages[1:], 2
    for number, message in enumerate(messages):
        where = f"{origin}: message {first_number + number}"
        if message.role == SYSTEM:
            raise RecordsError(f"{where} is a system text; expected it first, or under `system`")
        if message.role != (ASSISTANT if number % 2 else USER):
            turn = "an answer of the assistant" if number % 2 else "a question of the user"
            raise RecordsError(f"{where} has the role {message.role}; expected {turn}, the two alternate")
    if not messages:
        raise RecordsError(f"{origin}: it has no messages; expected at least one question and answer")
    is_open = len(messages) % 2 == 1
    if is_open and not finder.is_open(None):
        raise RecordsError(f"{origin}: the last question has no answer; training needs one")
    turns = [
        Turn(text(user.content, "question", origin), finder.answer(assistant.content, "answer", origin))
        for user, assistant in zip(messages[::2], messages[1::2], strict=False)
    ]
    return system, (*turns, *([Turn(text(messages[-1].content, "question", origin), "")] if is_open else []))


def to_messages(system: str | None, turns: Sequence[Turn]) -> list[Message]:
    first = [] if system is None else [Message(SYSTEM, system)]
    pairs = [(Message(USER, turn.question), Message(ASSISTANT, turn.answer)) for turn in turns]
    return first + [message for pair in pairs for message in pair]


def read_conversations(row: Row, finder: Finder, origin: str) -> Record:
    messages = []
    for number, value in enumerate(items(need(row, "conversations", origin), "conversations", origin), start=1):
        keys = ("role", "content") if isinstance(value, dict) and "role" in value else ("from", "value")
        messages.append(read_message(value, f"{origin}: message {number}", keys))
    return to_record(row, ("conversations",), messages, image_references(row, origin), finder, origin)


def write_llava(record: Record, images: list[str]) -> Row:
    """Write one image as a text, several as a list; without images there is no key for them."""
    shown = {} if not images else {"image": images[0] if len(images) == 1 else images}
    return dict(record.metadata) | shown | _conversations(record)


def write_sharegpt(record: Record, images: list[str]) -> Row:
    """Write all images as a list."""
    return dict(record.metadata) | _conversations(record) | {"images": images}


def _conversations(record: Record) -> Row:
    messages = to_messages(None, _with_tags(record, between="\n"))
    rows = [{"from": "human" if message.role == USER else "gpt", "value": message.content} for message in messages]
    return {"conversations": rows} | ({} if record.system is None else {"system": record.system})


def _with_tags(record: Record, between: str = "") -> list[Turn]:
    """The turns with an image tag for each image before the first question, each followed by `between`."""
    first, *later = record.turns
    return [replace(first, question=add_tags(first.question, len(record.images), between)), *later]


IMAGE_KEYS = ("path", "url", "image")
"""The keys under which a part of type `image` may have its reference."""
ALLOWED_KEYS = {
    "text": ("type", "text", "index"),
    "image": ("type", *IMAGE_KEYS, "index"),
    "image_url": ("type", "image_url", "index"),
}
"""The keys of each type of part; all others must be empty."""


class FromImages(NamedTuple):
    """Stands for the reference of a part that has none itself, because it is under `images`."""

    number: int | None
    """Its position in `images`, from 0, if the part has an `index`."""


def read_messages(row: Row, finder: Finder, origin: str) -> Record:
    messages: list[Message] = []
    references: list[Any] = []
    for number, value in enumerate(items(need(row, "messages", origin), "messages", origin), start=1):
        message = read_message(value, f"{origin}: message {number}")
        if isinstance(message.content, list):
            text, in_parts = _join_parts(message, number, finder, origin)
            if in_parts and (message.role != USER or any(before.role == USER for before in messages)):
                raise RecordsError(f"{origin}: an image in message {number}, of the {message.role}; {MOVE_IMAGES}")
            references += in_parts
            message = Message(message.role, text, has_tags=False)
        messages.append(message)
    references = _resolve(references, image_references(row, origin), origin)
    return to_record(row, ("messages",), messages, references, finder, origin)


def _join_parts(message: Message, number: int, finder: Finder, origin: str) -> tuple[str, list[Any]]:
    """Return the text of a message and its image references, which must all be before the text or after it."""
    parts = [_part(part, message.role, f"{origin}: message {number}", finder) for part in message.content]
    if [kind for kind, _ in groupby(parts, key=lambda part: part[0])].count("text") > 1:
        raise RecordsError(f"{origin}: an image in the middle of message {number}; {MOVE_IMAGES}")
    text = "".join(value for kind, value in parts if kind == "text")
    return text, [value for kind, value in parts if kind != "text"]


def _part(part: Any, role: str, where: str, finder: Finder) -> tuple[str, Any]:
    """Return "text" or "image", and the text or the image reference; `where` is the message."""
    name = part.get("type") if isinstance(part, dict) else None
    if not isinstance(name, str) or name not in ALLOWED_KEYS:
        description = f"{kind(part)}, of type {shown(name)}" if name else kind(part)
        raise RecordsError(f"{where} has a part that is {description}; expected one of type {', '.join(ALLOWED_KEYS)}")
    for value in (part, part.get("image_url")):
        refuse_pixel_limits(value, f"{where} has a part with")
    if unknown := [key for key, value in part.items() if key not in ALLOWED_KEYS[name] and value is not None]:
        raise RecordsError(
            f"{where} has a part with `{unknown[0]}`, which would be lost; expected {ALLOWED_KEYS[name]}"
        )
    if name == "text":
        text = need(part, "text", where)
        if role == ASSISTANT and is_number(text):
            return "text", finder.answer(text, "text", where)
        if not isinstance(text, str):
            raise RecordsError(f"{where} has a part whose `text` is {kind(text)}; expected text")
        return "text", text
    if name == "image_url":
        value = need(part, "image_url", where)
        return "image", need(value, "url", where) if isinstance(value, dict) else value
    references = [part[key] for key in IMAGE_KEYS if part.get(key) is not None]
    return "image", references[0] if references else FromImages(part.get("index"))


def _resolve(in_parts: list[Any], images: Sequence[Any], origin: str) -> list[Any]:
    """Return all references in order: those of the parts, with each `FromImages` replaced by the next of `images`."""
    if not in_parts:
        return list(images)
    missing = [reference for reference in in_parts if isinstance(reference, FromImages)]
    if len(missing) != len(images):
        raise RecordsError(
            f"{origin}: {len(missing)} image parts have no reference of their own, and `images` has {len(images)}; "
            "expected the same number"
        )
    for index, reference in enumerate(missing):
        if reference.number not in (None, index):
            raise RecordsError(f"{origin}: image part {index} has the index {reference.number}; expected them in order")
    following = iter(images)
    return [next(following) if isinstance(reference, FromImages) else reference for reference in in_parts]


def write_messages(record: Record, images: list[str]) -> Row:
    """Write texts with image tags, and a list of images."""
    return dict(record.metadata) | {"messages": _messages(record.system, _with_tags(record)), "images": images}


def write_parts(record: Record, images: list[str]) -> Row:
    """Write all contents as lists of parts, so that a parquet column of them has one type."""
    return _as_parts(record, [{"type": "image", "path": name} for name in images])


def write_openai(record: Record, images: list[str]) -> Row:
    """Write lists of parts with images as file:// URLs, as the format has URLs; without images, write texts."""
    if not images:
        return dict(record.metadata) | {"messages": _messages(record.system, record.turns)}
    urls = [image.absolute().as_uri() for image in record.images]
    return _as_parts(record, [{"type": "image_url", "image_url": {"url": url}} for url in urls])


def _as_parts(record: Record, images: list[Row]) -> Row:
    rows = _messages(record.system, record.turns)
    for message in rows:
        message["content"] = [{"type": "text", "text": message["content"]}]
    next(message for message in rows if message["role"] == USER)["content"][:0] = images
    return dict(record.metadata) | {"messages": rows}


def _messages(system: str | None, turns: Sequence[Turn]) -> list[Row]:
    return [{"role": message.role, "content": message.content} for message in to_messages(system, turns)]


def read_alpaca(row: Row, finder: Finder, origin: str) -> Record:
    instruction = text(need(row, "instruction", origin), "instruction", origin)
    is_open = finder.is_open(need(row, "output", origin))
    output = "" if is_open else finder.answer(row["output"], "output", origin)
    more = optional_text(row.get("input"), "input", origin)
    turns = [_pair(pair, finder, origin) for pair in items(row.get("history") or [], "history", origin)]
    turns.append(Turn(instruction if more is None else f"{instruction}\n{more}", output))
    keys, messages = ("instruction", "input", "output", "history"), to_messages(None, turns)
    return to_record(row, keys, messages[: -1 if is_open else None], image_references(row, origin), finder, origin)


def _pair(value: Any, finder: Finder, origin: str) -> Turn:
    if not isinstance(value, list) or len(value) != 2:
        raise RecordsError(f"{origin}: `history` must be pairs of a question and an answer, got {kind(value)}")
    return Turn(text(value[0], "history", origin), finder.answer(value[1], "history", origin))


def write_alpaca(record: Record, images: list[str]) -> Row:
    """Write the last turn as instruction and output, and the turns before it as history."""
    pairs = [[turn.question, turn.answer] for turn in _with_tags(record)]
    instruction, output = pairs[-1]
    row: Row = {"instruction": instruction, "input": "", "output": output}
    if record.system is not None:
        row["system"] = record.system
    if len(pairs) > 1:
        row["history"] = pairs[:-1]
    return dict(record.metadata) | row | {"images": images}
