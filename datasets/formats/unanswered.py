"""Questions whose answer is not known, in every record format: the last question of a record may lack its answer.

    {"image": "a.jpg", "question": "Is there text?"}
    {"messages": [{"role": "user", "content": "<image>Is there text?"}], "images": ["a.jpg"]}

Design: the readers of the formats are strict and know records with answers only. So a row gets a placeholder for the
answer before it is read, which is removed from the record. Earlier answers are part of the prompt and must be there.
"""

from __future__ import annotations

from dataclasses import replace

from lookonce.datasets.formats.checks import Row
from lookonce.datasets.formats.record import Record, Turn
from lookonce.datasets.readers.image_column import ANSWER_NAMES

PLACEHOLDER = "unknown"


def add_placeholder(row: Row, kind: str) -> bool:
    """Give a row of a kind of formats an answer to its last question; False if it has one, or has no question."""
    if kind in ("conversations", "messages"):
        return _add_message(row.get(kind))
    turns = row.get("turns", [row])
    last = turns[-1] if isinstance(turns, list) and turns else None
    if not isinstance(last, dict):
        return False
    key = "output" if kind == "alpaca" else next((name for name in ANSWER_NAMES if name in last), "answer")
    if last.get(key) not in (None, "", []):
        return False
    last[key] = PLACEHOLDER
    return True


def without_placeholder(record: Record) -> Record:
    """The record, whose last turn then has an empty answer."""
    return replace(record, turns=(*record.turns[:-1], Turn(record.turns[-1].question, "")))


def _add_message(messages: object) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role", last.get("from")) not in ("user", "human"):
        return False
    assert isinstance(messages, list)
    names = ("role", "content", "assistant") if "role" in last else ("from", "value", "gpt")
    messages.append({names[0]: names[2], names[1]: PLACEHOLDER})
    return True
