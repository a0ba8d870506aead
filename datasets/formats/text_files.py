"""Files of text that hold records: JSONL, a JSON array, CSV.

Design: JSONL and CSV are read line by line. Of an array the text is in memory and one record at a time is decoded, so
that each has its line in messages. Lines end at line feeds; U+2028 and its like are part of a text. CSV is as Python's
and spreadsheets' (RFC 4180), with a head; all its cells are texts, and an empty cell says that there is nothing.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lookonce.datasets.formats.checks import Row, is_utf8
from lookonce.errors import RecordsError

Rows = Iterator[tuple[str, Any]]
"""Where each record stands, "train.jsonl:12", and what stands there."""
Named = Iterable[tuple[str, Row]]
"""Rows to write, and what to call each in a message."""
DECODE = json.JSONDecoder().raw_decode
SPACE = re.compile(r"[ \t\r\n]*")
LARGEST_CELL = 1 << 30


def read_jsonl(path: Path) -> Rows:
    """An object a line; blank lines are none."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _decode(line.rstrip("\n"), f"{path}:{number}")


def _decode(line: str, origin: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordsError(f"{origin}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        raise RecordsError(f"{origin}: not JSON that can be read ({error})") from None


def read_array(path: Path) -> Rows:
    """The objects of one JSON array."""
    text = path.read_text(encoding="utf-8-sig")
    place, line, counted = _after_space(text, _after_space(text, 0) + 1), 1, 0
    is_open = text[place : place + 1] != "]"
    while is_open:
        line, counted = line + text.count("\n", counted, place), place
        value, end = _decode_at(text, place, f"{path}:{line}", path)
        yield f"{path}:{line}", value
        place = _after_space(text, end)
        is_open = text[place : place + 1] == ","
        place = _after_space(text, place + 1) if is_open else place
    if text[place : place + 1] != "]":
        raise RecordsError(f"{path}: after the record of line {line} comes neither a comma nor a ]; is it cut off?")
    if text[place + 1 :].strip():
        raise RecordsError(f"{path}: more comes after the end of its array; expected one array, or one object a line")


def _decode_at(text: str, place: int, origin: str, path: Path) -> tuple[Any, int]:
    """The value that begins there, and where it ends."""
    try:
        return DECODE(text, place)
    except json.JSONDecodeError as error:
        raise RecordsError(f"{path}:{error.lineno}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise RecordsError(f"{origin}: not JSON that can be read ({error})") from None


def _after_space(text: str, place: int) -> int:
    match = SPACE.match(text, place)
    assert match is not None
    return match.end()


def read_csv(path: Path, delimiter: str = ",") -> Rows:
    """A row a record, its cells by the names in the head; empty cells are left out."""
    csv.field_size_limit(LARGEST_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        start = 1
        try:
            head = next(rows, [])
            _check_head(head, path)
            start = rows.line_num + 1
            for cells in rows:
                if cells:
                    yield f"{path}:{start}", _row(head, cells, f"{path}:{start}")
                start = rows.line_num + 1
        except csv.Error as error:
            raise RecordsError(f"{path}:{start}: not CSV ({error})") from None


def _check_head(head: list[str], path: Path) -> None:
    if twice := [name for name in head if head.count(name) > 1]:
        raise RecordsError(f"{path}:1: two columns are called {twice[0]!r}; expected different names")


def _row(head: list[str], cells: list[str], origin: str) -> Row:
    if len(cells) != len(head):
        raise RecordsError(f"{origin}: it has {len(cells)} cells, and the head {len(head)}; are commas quoted?")
    return {name: cell for name, cell in zip(head, cells, strict=True) if cell}


def write_jsonl(path: Path, rows: Named) -> None:
    """An object a line."""
    with path.open("wb") as file:
        for name, row in rows:
            file.write(encode(row, name) + b"\n")


def write_array(path: Path, rows: Named) -> None:
    """One array, an object a line."""
    with path.open("wb") as file:
        file.write(b"[")
        for number, (name, row) in enumerate(rows):
            file.write(b",\n" if number else b"\n")
            file.write(encode(row, name))
        file.write(b"\n]\n")


def encode(row: Any, name: str) -> bytes:
    """A row as JSON.

    Raises:
        RecordsError: something in it is no JSON, or no UTF-8.
    """
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordsError(f"{name}: it can not be written as JSON in UTF-8 ({error})") from None


def write_csv(path: Path, rows: Named, delimiter: str = ",") -> None:
    """A head with the keys of all rows, in the order in which they first appear, and a line a row.

    What is no text is written as JSON.
    """
    texts = [{key: as_cell(value, name) for key, value in row.items()} for name, row in rows]
    head = list(dict.fromkeys(key for row in texts for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, head, restval="", delimiter=delimiter)
        writer.writeheader()
        writer.writerows(texts)


def as_cell(value: Any, name: str) -> str:
    """What a cell says of a value: nothing of None, a text itself, all else as JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) and is_utf8(value) else encode(value, name).decode()
