"""LLaVA and ShareGPT: messages under the key `conversations`.

    {"id": "1", "image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\\nIs there text?"},
     {"from": "gpt", "value": "yes"}]}

ShareGPT, as LLaMA-Factory writes it, has all images in a list, `images`, and optionally a `system` text. Both are read
by the same function: images under either key, roles as `from` and `value` or as `role` and `content`.
"""

from __future__ import annotations

from typing import Any

from lookonce.datasets.formats.checks import Row, items, need
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
from lookonce.datasets.formats.image_tags import add_tags
from lookonce.datasets.formats.record import Record


def read_conversations(row: Row, finder: Finder, origin: str) -> Record:
    """Read a LLaVA or ShareGPT record."""
    values = items(need(row, "conversations", origin), "conversations", origin)
    messages = [_message(value, number, origin) for number, value in enumerate(values, start=1)]
    return to_record(row, ("conversations",), messages, image_references(row, origin), finder, origin)


def _message(value: Any, number: int, origin: str) -> Message:
    keys = ("role", "content") if isinstance(value, dict) and "role" in value else ("from", "value")
    role, content = message_values(value, number, keys, origin)
    return Message(parse_role(role, number, origin), content)


def write_llava(record: Record, images: list[str]) -> Row:
    """Write one image as a text, several as a list; without images there is no key for them."""
    shown = {} if not images else {"image": images[0] if len(images) == 1 else images}
    return dict(record.metadata) | shown | _conversations(record)


def write_sharegpt(record: Record, images: list[str]) -> Row:
    """Write all images as a list."""
    return dict(record.metadata) | _conversations(record) | {"images": images}


def _conversations(record: Record) -> Row:
    messages = to_messages(None, record.turns)
    rows = [{"from": "human" if message.role == USER else "gpt", "value": message.content} for message in messages]
    rows[0]["value"] = add_tags(rows[0]["value"], len(record.images), between="\n")
    return {"conversations": rows} | ({} if record.system is None else {"system": record.system})
