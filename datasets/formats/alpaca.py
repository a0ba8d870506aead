"""Alpaca as LLaMA-Factory writes it: an instruction, an input and an output.

    {"instruction": "<image>Is there text?", "input": "", "output": "yes", "images": ["a.jpg"]}

If the input is not empty, the question is the instruction, a line break and the input. Earlier turns are in `history`,
a list of pairs; the image tags are then in the first of them.
"""

from __future__ import annotations

from typing import Any

from lookonce.datasets.formats.checks import Row, answer_text, items, kind, need, optional_text, text
from lookonce.datasets.formats.dialogue import image_references, to_messages, to_record
from lookonce.datasets.formats.image_refs import Finder
from lookonce.datasets.formats.image_tags import add_tags
from lookonce.datasets.formats.record import Record, Turn
from lookonce.errors import RecordsError

KEYS = ("instruction", "input", "output", "history")


def read_alpaca(row: Row, finder: Finder, origin: str) -> Record:
    """Read a record in LLaMA-Factory's Alpaca format."""
    instruction = text(need(row, "instruction", origin), "instruction", origin)
    output = answer_text(need(row, "output", origin), "output", origin)
    more = optional_text(row.get("input"), "input", origin)
    turns = [_pair(pair, origin) for pair in items(row.get("history") or [], "history", origin)]
    turns.append(Turn(instruction if more is None else f"{instruction}\n{more}", output))
    return to_record(row, KEYS, to_messages(None, turns), image_references(row, origin), finder, origin)


def _pair(value: Any, origin: str) -> Turn:
    if not isinstance(value, list) or len(value) != 2:
        raise RecordsError(f"{origin}: `history` must be pairs of a question and an answer, got {kind(value)}")
    return Turn(text(value[0], "history", origin), answer_text(value[1], "history", origin))


def write_alpaca(record: Record, images: list[str]) -> Row:
    """Write the last turn as instruction and output, and the turns before it as history."""
    pairs = [[turn.question, turn.answer] for turn in record.turns]
    pairs[0][0] = add_tags(pairs[0][0], len(images))
    instruction, output = pairs[-1]
    row: Row = {"instruction": instruction, "input": "", "output": output}
    if record.system is not None:
        row["system"] = record.system
    if len(pairs) > 1:
        row["history"] = pairs[:-1]
    return dict(record.metadata) | row | {"images": images}
