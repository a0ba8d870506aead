"""LLaVA and ShareGPT: `conversations` in which somebody says something.

    {"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nIs there text?"},
     {"from": "gpt", "value": "yes"}]}

ShareGPT, as LLaMA-Factory has it, names all images in a list, `images`, and may have a `system` text. Both are read
alike: images under one key or the other, speakers as `from` and `value` or as `role` and `content`.
"""

from __future__ import annotations

from typing import Any

from lookonce.datasets.formats.checks import Row, items, need
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
from lookonce.datasets.formats.image_tags import with_marks
from lookonce.datasets.formats.record import Record


def read_conversations(row: Row, finder: Finder, origin: str) -> Record:
    """A record of LLaVA's or ShareGPT's."""
    said = items(need(row, "conversations", origin), "conversations", origin)
    speeches = [_speech(message, number, origin) for number, message in enumerate(said, start=1)]
    return to_record(row, ("conversations",), speeches, image_references(row, origin), finder, origin)


def _speech(message: Any, number: int, origin: str) -> Speech:
    keys = ("role", "content") if isinstance(message, dict) and "role" in message else ("from", "value")
    speaker, said = content_of(message, number, keys, origin)
    return Speech(role_of(speaker, number, origin), said)


def write_llava(record: Record, images: list[str]) -> Row:
    """One image as text, several as a list, none not at all."""
    shown = {} if not images else {"image": images[0] if len(images) == 1 else images}
    return dict(record.metadata) | shown | _conversations(record)


def write_sharegpt(record: Record, images: list[str]) -> Row:
    """All images as a list."""
    return dict(record.metadata) | _conversations(record) | {"images": images}


def _conversations(record: Record) -> Row:
    speeches = to_speeches(None, record.turns)
    said = [{"from": "human" if speech.role == USER else "gpt", "value": speech.content} for speech in speeches]
    said[0]["value"] = with_marks(said[0]["value"], len(record.images), between="\n")
    return {"conversations": said} | ({} if record.system is None else {"system": record.system})
