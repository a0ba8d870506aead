"""Text files: CSV, JSON arrays and JSONL. Each row comes with its origin, "train.jsonl:12".

Design: JSONL and CSV are read line by line. The text of an array is in memory and one entry at a time is decoded, so
that errors name the line. Lines end at line feeds only; U+2028 and similar characters are part of a text. CSV is that
of Python and spreadsheets (RFC 4180), with a header; all cells are texts.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lookonce.errors import RecordsError

Rows = Iterator[tuple[str, Any]]
"""The origin of each row for messages, and its value."""
HEAD_BYTES = 4096
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DECODE = json.JSONDecoder().raw_decode
SPACE = re.compile(r"[ \t\r\n]*")
MAX_CELL_CHARACTERS = 1 << 30


def read_head(path: Path) -> bytes:
    """The first bytes of a file, by which its type is recognised."""
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def is_array(head: bytes) -> bool:
    """Whether a JSON file that begins with these bytes holds an array, not one object per line."""
    return head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def read_jsonl(path: Path, name: str | None = None) -> Rows:
    """One value per line; blank lines are skipped. `name` replaces the path in messages, also below."""
    name = name or str(path)
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{name}:{number}", decode_json(line.rstrip("\n"), f"{name}:{number}")


def decode_json(text: str, origin: str) -> Any:
    """The value of a JSON text.

    Raises:
        RecordsError: it is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordsError(f"{origin}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # too many digits or too deep nesting
        raise RecordsError(f"{origin}: not JSON that can be read ({error})") from None


def read_array(path: Path, name: str | None = None) -> Rows:
    """The entries of one JSON array."""
    name, text = name or str(path), path.read_text(encoding="utf-8-sig")
    position, line, counted = _skip_space(text, _skip_space(text, 0) + 1), 1, 0
    is_open = text[position : position + 1] != "]"
    while is_open:
        line, counted = line + text.count("\n", counted, position), position
        value, end = _decode_entry(text, position, f"{name}:{line}", name)
        yield f"{name}:{line}", value
        position = _skip_space(text, end)
        is_open = text[position : position + 1] == ","
        position = _skip_space(text, position + 1) if is_open else position
    if text[position : position + 1] != "]":
        raise RecordsError(f"{name}: expected a comma or ] after the entry of line {line}; is the file cut off?")
    if text[position + 1 :].strip():
        raise RecordsError(f"{name}: text after the end of the array; expected one array, or one object per line")


def _decode_entry(text: str, position: int, origin: str, name: str) -> tuple[Any, int]:
    """The value that begins at `position`, and where it ends."""
    try:
        return DECODE(text, position)
    except json.JSONDecodeError as error:
        raise RecordsError(f"{name}:{error.lineno}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise RecordsError(f"{origin}: not JSON that can be read ({error})") from None


def _skip_space(text: str, position: int) -> int:
    match = SPACE.match(text, position)
    assert match is not None
    return match.end()


def read_csv(path: Path, name: str | None = None, delimiter: str = ",") -> Rows:
    """The cells of each row by the names in the header; blank lines are skipped."""
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    name, start = name or str(path), 1
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(rows, [])
            _check_header(header, name)
            start = rows.line_num + 1
            for cells in rows:
                if cells:
                    yield f"{name}:{start}", _row(header, cells, f"{name}:{start}")
                start = rows.line_num + 1
        except csv.Error as error:
            raise RecordsError(f"{name}:{start}: not CSV ({error})") from None


def _check_header(header: list[str], name: str) -> None:
    if twice := [column for column in header if header.count(column) > 1]:
        raise RecordsError(f"{name}:1: two columns are called {twice[0]!r}; expected different names")


def _row(header: list[str], cells: list[str], origin: str) -> dict[str, str]:
    if len(cells) != len(header):
        raise RecordsError(
            f"{origin}: expected {len(header)} cells as in the header, got {len(cells)}; are commas quoted?"
        )
    return dict(zip(header, cells, strict=True))
