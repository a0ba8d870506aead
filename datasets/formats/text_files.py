"""Text files that hold records: JSONL, a JSON array, CSV. They are read by `readers.text`; here is what is written."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lookonce.datasets.formats.checks import Row, is_utf8, shown
from lookonce.datasets.readers.image_column import QUESTION_NAMES, respelt
from lookonce.datasets.readers.text import Broken, Rows, read_csv, refuse
from lookonce.errors import RecordsError

FORMULA = re.compile(r"'*(\s*[=+\-@]|[\t\r\n])")
"""How a cell begins that a spreadsheet takes for a formula, or, after apostrophes, one that is marked as text."""
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
Named = Iterable[tuple[str, Row]]
"""Rows to write, and what to call each in a message."""


def read_table(path: Path, delimiter: str | None = None, broken: Broken = refuse) -> Rows:
    """A record per row of CSV; an empty cell is a key that the record does not have."""
    for origin, cells in read_csv(path, delimiter=delimiter, broken=broken):
        if not set(QUESTION_NAMES) & set(cells):
            what = f"{path}:1: no column is called `{QUESTION_NAMES[0]}`, got {shown(list(cells))}{respelt(cells)}"
            return broken(f"{path}:1", RecordsError(f"{what}; the first line of a table must name its columns"))
        yield origin, {from_cell(name): from_cell(cell) for name, cell in cells.items() if cell}


def write_jsonl(path: Path, rows: Named) -> None:
    """One object per line."""
    with path.open("wb") as file:
        for name, row in rows:
            file.write(encode(row, name) + b"\n")


def write_array(path: Path, rows: Named) -> None:
    """One array, one object per line."""
    with path.open("wb") as file:
        file.write(b"[")
        for number, (name, row) in enumerate(rows):
            file.write(b",\n" if number else b"\n")
            file.write(encode(row, name))
        file.write(b"\n]\n")


def encode(row: Any, name: str) -> bytes:
    """A row as JSON.

    Raises:
        RecordsError: a value has no JSON type, or a text is not valid UTF-8.
    """
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordsError(f"{name}: cannot be written as JSON in UTF-8 ({error})") from None


def write_csv(path: Path, rows: Named, delimiter: str = ",") -> None:
    """A header with the keys of all rows, in order of first appearance, and one line per row.

    Values that are not texts are written as JSON.
    """
    texts = [{safe_cell(key): safe_cell(as_cell(value, name)) for key, value in row.items()} for name, row in rows]
    header = list(dict.fromkeys(key for row in texts for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, header, restval="", delimiter=delimiter)
        writer.writeheader()
        writer.writerows(texts)


def safe_cell(text: str) -> str:
    """A cell that no spreadsheet runs as a formula: with an apostrophe before it, unless it is a number."""
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text


def from_cell(text: str) -> str:
    """The text that `safe_cell` has written."""
    return text[1:] if text.startswith("'") and FORMULA.match(text) else text


def as_cell(value: Any, name: str) -> str:
    """The cell of a value: empty for None, a text unchanged, all else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) and is_utf8(value) else encode(value, name).decode()
