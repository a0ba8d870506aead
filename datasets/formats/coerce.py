"""Answers that are numbers or booleans, as text.

    {"question": "How many polyps?", "answer": 2}       is read as "2"
    {"question": "Is there text?", "answer": true}      is read as "true"

Design: answers are text, because a model learns and is scored on text: 2 and 2.0 are different answers. So a number is
an error, unless the user asks for this. The text is that of JSON: `true`, `false`, and for a number the shortest one
that reads back as the same number. NaN and null are missing values and stay errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lookonce.datasets.formats.checks import Row, is_number
from lookonce.datasets.readers.image_column import ANSWER_NAMES

Place = tuple[Any, Any]
"""An object and one of its keys, or a list and one of its positions."""
ASSISTANTS = ("assistant", "gpt")


def coerce_answers(row: Row, kind: str) -> int:
    """Replace the answers of a row of a kind of formats that are numbers or booleans; returns how many there were."""
    numbers = [(holder, key) for holder, key in _answers(row, kind) if is_number(holder[key])]
    for holder, key in numbers:
        holder[key] = json.dumps(holder[key])
    return len(numbers)


def _answers(row: Row, kind: str) -> Iterator[Place]:
    """Where the answers of a row are, also those that are not valid."""
    if kind == "native":
        yield from _native(row)
    elif kind == "alpaca":
        yield from _present(row, "output")
        yield from ((pair, 1) for pair in _lists(row.get("history")) if len(pair) == 2)
    else:
        for message in _objects(row.get("conversations" if kind == "conversations" else "messages")):
            if message.get("role", message.get("from")) in ASSISTANTS:
                yield from _present(message, "content")
                yield from _present(message, "value")
                yield from (place for part in _objects(message.get("content")) for place in _present(part, "text"))


def _native(row: Row) -> Iterator[Place]:
    turns = _objects(row["turns"]) if "turns" in row else [row]
    for turn in turns:
        key = next((name for name in ANSWER_NAMES if name in turn), "answer")
        answers = turn.get(key)
        yield from (
            ((answers, place) for place in range(len(answers))) if isinstance(answers, list) else _present(turn, key)
        )
    metadata = row.get("metadata") if "turns" in row else row
    references = metadata.get("references") if isinstance(metadata, dict) else None
    if isinstance(references, list):
        yield from ((references, position) for position in range(len(references)))


def _present(row: Row, key: str) -> Iterator[Place]:
    if key in row:
        yield row, key


def _objects(value: Any) -> list[Row]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _lists(value: Any) -> list[list[Any]]:
    return [item for item in value if isinstance(item, list)] if isinstance(value, list) else []
