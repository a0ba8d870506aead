"""Messages: with marks and a list of images, with lists of parts, with OpenAI's parts.

    {"messages": [{"role": "user", "content": "<image>Is there text?"}, {"role": "assistant", "content": "yes"}],
     "images": ["/data/a.jpg"]}

    {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.jpg"}, {"type": "text", "text": "..."}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]}

    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///data/a.jpg"}}, ...

The first is ms-swift's and LLaMA-Factory's, the second Hugging Face's, TRL's and Axolotl's, the third OpenAI's. All are
read alike, message by message. A part `{"type": "image"}` that names nothing takes the next of `images`, or that of its
`index`, as TRL's sets have it. In a list of parts `<image>` is a word, and texts that follow each other are one text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lookonce.datasets.formats.checks import Row, items, kind, need
from lookonce.datasets.formats.dialogue import (
    USER,
    Speech,
    content_of,
    image_references,
    role_of,
    to_record,
    to_speeches,
)
from lookonce.datasets.formats.image_refs import Finder
from lookonce.datasets.formats.image_tags import WHERE, with_marks
from lookonce.datasets.formats.record import Record
from lookonce.errors import RecordsError

SOURCES = ("path", "url", "image", "base64")
"""Where a part of type `image` may say which it is."""
ALLOWED = {
    "text": ("type", "text", "index"),
    "image": ("type", *SOURCES, "index"),
    "image_url": ("type", "image_url", "index"),
}
"""The keys of each type of part; others must be empty."""


class Elsewhere(NamedTuple):
    """The reference of a part that says no more than that there is an image, which stands under `images`."""

    number: int | None


def read_messages(row: Row, finder: Finder, origin: str) -> Record:
    """A record of messages, each with text or parts."""
    speeches: list[Speech] = []
    references: list[Any] = []
    for number, message in enumerate(items(need(row, "messages", origin), "messages", origin), start=1):
        role, content = content_of(message, number, ("role", "content"), origin)
        speech = Speech(role_of(role, number, origin), content)
        if isinstance(content, list):
            said, shown = _parts(content, number, origin)
            if shown and (speech.role != USER or any(before.role == USER for before in speeches)):
                raise RecordsError(f"{origin}: an image in message {number}, of the {speech.role}; {WHERE}")
            references += shown
            speech = Speech(speech.role, said, has_marks=False)
        speeches.append(speech)
    references = _filled(references, image_references(row, origin), origin)
    return to_record(row, ("messages",), speeches, references, finder, origin)


def _parts(content: list[Any], number: int, origin: str) -> tuple[str, list[Any]]:
    """The text of a message and the references of its images, which all stand before or after it."""
    parts = [_part(part, number, origin) for part in content]
    if [kind for kind, _ in groupby(parts, key=lambda part: part[0])].count("text") > 1:
        raise RecordsError(f"{origin}: an image in the middle of message {number}; {WHERE}")
    said = "".join(value for kind, value in parts if kind == "text")
    return said, [value for kind, value in parts if kind != "text"]


def _part(part: Any, number: int, origin: str) -> tuple[str, Any]:
    """What a part is, and its text or reference."""
    where = f"{origin}: message {number}"
    name = part.get("type") if isinstance(part, dict) else None
    if not isinstance(name, str) or name not in ALLOWED:
        raise RecordsError(f"{where} has a part that is {kind(part)}; expected one of type {', '.join(ALLOWED)}")
    if other := [key for key, value in part.items() if key not in ALLOWED[name] and value is not None]:
        raise RecordsError(f"{where} has a part with `{other[0]}`, which would be lost; expected {ALLOWED[name]}")
    if name == "text":
        said = need(part, "text", where)
        if not isinstance(said, str):
            raise RecordsError(f"{where} has a part whose `text` is {kind(said)}; expected text")
        return "text", said
    if name == "image_url":
        value = need(part, "image_url", where)
        return "image", need(value, "url", where) if isinstance(value, dict) else value
    given = [part[key] for key in SOURCES if part.get(key) is not None]
    return "image", given[0] if given else Elsewhere(part.get("index"))


def _filled(shown: list[Any], images: Sequence[Any], origin: str) -> list[Any]:
    """References in their order: those of parts, or those under `images`, or the latter in the places of the former."""
    if not shown:
        return list(images)
    num_elsewhere = sum(isinstance(reference, Elsewhere) for reference in shown)
    if num_elsewhere != len(images):
        raise RecordsError(
            f"{origin}: {num_elsewhere} parts show an image without saying which, and {len(images)} are under "
            "`images`; expected as many"
        )
    following = iter(enumerate(images))
    return [_image_of(reference, following, origin) for reference in shown]


def _image_of(reference: Any, following: Iterator[tuple[int, Any]], origin: str) -> Any:
    if not isinstance(reference, Elsewhere):
        return reference
    place, image = next(following)
    if reference.number not in (None, place):
        raise RecordsError(f"{origin}: image part {place} has the index {reference.number}; expected them in order")
    return image


def write_messages(record: Record, images: list[str]) -> Row:
    """Texts with marks, and a list of images."""
    said = _messages(record)
    first = _first_question(said)
    first["content"] = with_marks(first["content"], len(images))
    return dict(record.metadata) | {"messages": said, "images": images}


def write_parts(record: Record, images: list[str]) -> Row:
    """Lists of parts throughout, so that a column has one type."""
    said = _messages(record)
    for message in said:
        message["content"] = [_text_part(message["content"])]
    _first_question(said)["content"][:0] = [{"type": "image", "path": name} for name in images]
    return dict(record.metadata) | {"messages": said}


def write_openai(record: Record, images: list[str]) -> Row:
    """Lists of parts where images are shown, these as file:// URLs, since it is URLs that are asked for; else texts."""
    if not images:
        return dict(record.metadata) | {"messages": _messages(record)}
    row = write_parts(record, [])
    _first_question(row["messages"])["content"][:0] = [_url_part(image) for image in record.images]
    return row


def _messages(record: Record) -> list[Row]:
    return [{"role": speech.role, "content": speech.content} for speech in to_speeches(record.system, record.turns)]


def _first_question(said: Iterable[Row]) -> Row:
    return next(message for message in said if message["role"] == USER)


def _text_part(content: str) -> Row:
    return {"type": "text", "text": content}


def _url_part(image: Path) -> Row:
    return {"type": "image_url", "image_url": {"url": image.absolute().as_uri()}}
