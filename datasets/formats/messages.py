"""Messages: with image tags and a list of images, with content parts, or with OpenAI's content parts.

    {"messages": [{"role": "user", "content": "<image>Is there text?"}, {"role": "assistant", "content": "yes"}],
     "images": ["/data/a.jpg"]}

    {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.jpg"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]}

    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///data/a.jpg"}}, ...

The first is the format of ms-swift and LLaMA-Factory, the second of Hugging Face, TRL and Axolotl, the third of OpenAI.
One function reads all three, and a file may mix them. A part `{"type": "image"}` without a path refers to the next of
`images`, or to the one with its `index`, as in TRL's datasets. In content parts `<image>` is a word; the text parts of
a message are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lookonce.datasets.formats.checks import Row, items, kind, need, refuse_pixel_limits, shown
from lookonce.datasets.formats.dialogue import (
    USER,
    Message,
    image_references,
    message_values,
    parse_role,
    to_messages,
    to_record,
)
from lookonce.datasets.formats.image_refs import Finder
from lookonce.datasets.formats.image_tags import MOVE_IMAGES, add_tags
from lookonce.datasets.formats.record import Record
from lookonce.errors import RecordsError

IMAGE_KEYS = ("path", "url", "image", "base64")
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
    """Read a record of messages, each with a text or with parts."""
    messages: list[Message] = []
    references: list[Any] = []
    for number, value in enumerate(items(need(row, "messages", origin), "messages", origin), start=1):
        role, content = message_values(value, number, ("role", "content"), origin)
        message = Message(parse_role(role, number, origin), content)
        if isinstance(content, list):
            text, in_parts = _join_parts(content, number, origin)
            if in_parts and (message.role != USER or any(before.role == USER for before in messages)):
                raise RecordsError(f"{origin}: an image in message {number}, of the {message.role}; {MOVE_IMAGES}")
            references += in_parts
            message = Message(message.role, text, has_tags=False)
        messages.append(message)
    references = _resolve(references, image_references(row, origin), origin)
    return to_record(row, ("messages",), messages, references, finder, origin)


def _join_parts(content: list[Any], number: int, origin: str) -> tuple[str, list[Any]]:
    """Return the text of a message and its image references, which must all be before the text or after it."""
    parts = [_part(part, number, origin) for part in content]
    if [kind for kind, _ in groupby(parts, key=lambda part: part[0])].count("text") > 1:
        raise RecordsError(f"{origin}: an image in the middle of message {number}; {MOVE_IMAGES}")
    text = "".join(value for kind, value in parts if kind == "text")
    return text, [value for kind, value in parts if kind != "text"]


def _part(part: Any, number: int, origin: str) -> tuple[str, Any]:
    """Return "text" or "image", and the text or the image reference."""
    where = f"{origin}: message {number}"
    name = part.get("type") if isinstance(part, dict) else None
    if not isinstance(name, str) or name not in ALLOWED_KEYS:
        what = f"{kind(part)}, of type {shown(name)}" if name else kind(part)
        raise RecordsError(f"{where} has a part that is {what}; expected one of type {', '.join(ALLOWED_KEYS)}")
    for value in (part, part.get("image_url")):
        refuse_pixel_limits(value, f"{where} has a part with")
    if other := [key for key, value in part.items() if key not in ALLOWED_KEYS[name] and value is not None]:
        raise RecordsError(f"{where} has a part with `{other[0]}`, which would be lost; expected {ALLOWED_KEYS[name]}")
    if name == "text":
        text = need(part, "text", where)
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
    num_missing = sum(isinstance(reference, FromImages) for reference in in_parts)
    if num_missing != len(images):
        raise RecordsError(
            f"{origin}: {num_missing} image parts have no reference of their own, and `images` has {len(images)}; "
            "expected the same number"
        )
    following = iter(enumerate(images))
    return [_resolve_one(reference, following, origin) for reference in in_parts]


def _resolve_one(reference: Any, following: Iterator[tuple[int, Any]], origin: str) -> Any:
    if not isinstance(reference, FromImages):
        return reference
    index, image = next(following)
    if reference.number not in (None, index):
        raise RecordsError(f"{origin}: image part {index} has the index {reference.number}; expected them in order")
    return image


def write_messages(record: Record, images: list[str]) -> Row:
    """Write texts with image tags, and a list of images."""
    rows = _messages(record)
    first = _first_question(rows)
    first["content"] = add_tags(first["content"], len(images))
    return dict(record.metadata) | {"messages": rows, "images": images}


def write_parts(record: Record, images: list[str]) -> Row:
    """Write all contents as lists of parts, so that a parquet column of them has one type."""
    rows = _messages(record)
    for message in rows:
        message["content"] = [_text_part(message["content"])]
    _first_question(rows)["content"][:0] = [{"type": "image", "path": name} for name in images]
    return dict(record.metadata) | {"messages": rows}


def write_openai(record: Record, images: list[str]) -> Row:
    """Write lists of parts with images as file:// URLs, as the format has URLs; without images, write texts."""
    if not images:
        return dict(record.metadata) | {"messages": _messages(record)}
    row = write_parts(record, [])
    _first_question(row["messages"])["content"][:0] = [_url_part(image) for image in record.images]
    return row


def _messages(record: Record) -> list[Row]:
    messages = to_messages(record.system, record.turns)
    return [{"role": message.role, "content": message.content} for message in messages]


def _first_question(rows: Iterable[Row]) -> Row:
    return next(message for message in rows if message["role"] == USER)


def _text_part(content: str) -> Row:
    return {"type": "text", "text": content}


def _url_part(image: Path) -> Row:
    return {"type": "image_url", "image_url": {"url": image.absolute().as_uri()}}
