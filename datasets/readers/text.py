"""Text files: CSV, JSON arrays and JSONL. Each row comes with its origin, "train.jsonl:12".

Design: JSONL and CSV are read line by line. The text of an array is in memory and one record at a time is decoded; its
records are counted from 1 ("train.json: record 12"), since all of them may be on one line. Lines end at line feeds
only; U+2028 and similar characters are part of a text. CSV is that of Python and spreadsheets (RFC 4180), with a
header; all cells are texts. Its separator is that of the header, since spreadsheets write semicolons in many countries.

The first row that cannot be read is an error. A caller that wants to know all of them passes `broken`; reading then
continues with the next row. After wrong JSON in an array, or wrong quotes in CSV, where the next row begins is unknown,
and reading ends.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from lookonce.datasets.readers.image_column import KEYS
from lookonce.errors import RecordsError
from lookonce.files import open_regular
from lookonce.text import listed, shown

Rows = Generator[tuple[str, Any], None, None]
"""The origin of each row for messages, and its value."""
Broken = Callable[[str, RecordsError], None]
"""Takes the origin of a row that cannot be read, and the error; the row is skipped unless this raises."""
HEAD_BYTES = 4096
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SPACE = re.compile(r"[ \t\r\n]*")
SEPARATORS = (",", "\t", ";", "|")
"""Separators of cells; the first is usual in .csv, the second in .tsv."""
SEPARATOR_LINE = re.compile(r"sep=([,;|\t])\s*", re.IGNORECASE)
"""The line before the header that names the separator to Excel."""
QUOTES = {
    "unexpected end of data": "a cell begins with a quote and no quote ends it",
    "expected after": "a quoted cell continues after its second quote; write a quote within a cell twice",
}
"""What the errors of Python's reader mean."""
MAX_CELL_CHARACTERS = 1 << 30
MAX_LINE_BYTES = 1 << 30
"""The longest line: a file of nothing but zeros may be a terabyte long and take no place on the disk."""
MAX_ARRAY_BYTES = 1 << 32
"""The largest JSON array, since all of its text is in memory."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys and values; Python itself would keep the last of two values without a word."""
    values = dict(pairs)
    if len(values) < len(pairs):
        key = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise ValueError(f"an object has the key {shown(key)!r} twice; keep one")
    return values


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def read_head(path: Path) -> bytes:
    """The first bytes of a file, by which its type is recognised.

    Raises:
        RecordsError: it is a device or a FIFO, which cannot be read twice.
    """
    try:
        with open_regular(path) as file:
            return file.read(HEAD_BYTES)
    except ValueError as error:
        raise RecordsError(str(error)) from None


def is_array(head: bytes) -> bool:
    """Whether a JSON file that begins with these bytes holds an array, not one object per line."""
    return head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def is_json(head: bytes) -> bool:
    """Whether a file that begins with these bytes holds JSON: an array or an object."""
    return head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith((b"[", b"{"))


def refuse(origin: str, error: RecordsError) -> None:
    """Raise the error: the first row that cannot be read ends the reading."""
    raise error from None


def read_jsonl(path: Path, name: str | None = None, broken: Broken = refuse) -> Rows:
    """One value per line; blank lines are skipped. `name` replaces the path in messages, also below."""
    name = name or str(path)
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), start=1):
            origin, line = f"{name}:{number}", line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            _check_length(line, origin)
            if not line.strip():
                continue
            try:
                value = decode_json(_decode_text(line, origin), origin)
            except RecordsError as error:
                broken(origin, error)
            else:
                yield origin, value


def _check_length(line: bytes | str, origin: str) -> None:
    if len(line) >= MAX_LINE_BYTES:
        raise RecordsError(f"{origin}: the line is longer than {MAX_LINE_BYTES:,} bytes; is this a text file?")


def not_utf8(place: str, error: UnicodeDecodeError, kind: str) -> RecordsError:
    """The error of a file, or a line of one, that is not in UTF-8."""
    advice = "convert one that was written on Windows with: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
    return RecordsError(f"{place} cannot be read ({error}); expected a {kind} file in UTF-8; {advice}")


def _decode_text(line: bytes, origin: str) -> str:
    try:
        return line.removesuffix(b"\n").decode()
    except UnicodeDecodeError as error:
        raise not_utf8(f"{origin}:", error, "JSONL") from None


def decode_json(text: str, origin: str) -> Any:
    """The value of a JSON text.

    Raises:
        RecordsError: it is not JSON.
    """
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RecordsError(f"{origin}: not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # too many digits or too deep nesting
        raise RecordsError(f"{origin}: not JSON that can be read ({error})") from None


def read_array(path: Path, name: str | None = None, broken: Broken = refuse) -> Rows:
    """The records of one JSON array."""
    name = name or str(path)
    if (num_bytes := path.stat().st_size) > MAX_ARRAY_BYTES:
        limit = f"expected at most {MAX_ARRAY_BYTES:,}"
        raise RecordsError(f"{name} has {num_bytes:,} bytes, {limit}; write one record a line, as JSONL")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(name, error, "JSON") from None
    position, number = _skip_space(text, _skip_space(text, 0) + 1), 0
    is_open = text[position : position + 1] != "]"
    while is_open:
        number += 1
        origin = f"{name}: record {number}"
        try:
            value, end = _decode_record(text, position, origin)
        except RecordsError as error:
            return broken(origin, error)
        yield origin, value
        position = _skip_space(text, end)
        is_open = text[position : position + 1] == ","
        position = _skip_space(text, position + 1) if is_open else position
    if text[position : position + 1] != "]":
        broken(name, RecordsError(f"{name}: expected a comma or ] after record {number}; is the file cut off?"))
    elif text[position + 1 :].strip():
        hint = "expected one array, or one object per line"
        broken(name, RecordsError(f"{name}: text after the end of the array; {hint}"))


def _decode_record(text: str, position: int, origin: str) -> tuple[Any, int]:
    """The value that begins at `position`, and where it ends."""
    try:
        return DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        place = f"at line {error.lineno}, column {error.colno}"
        raise RecordsError(f"{origin}: not JSON ({error.msg} {place})") from None
    except (ValueError, RecursionError) as error:
        raise RecordsError(f"{origin}: not JSON that can be read ({error})") from None


def _skip_space(text: str, position: int) -> int:
    match = SPACE.match(text, position)
    assert match is not None
    return match.end()


def read_csv(path: Path, name: str | None = None, delimiter: str | None = None, broken: Broken = refuse) -> Rows:
    """The cells of each row by the names in the header; blank lines are skipped.

    `delimiter` is by default the one that separates the header.
    """
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    name, start = name or str(path), 1
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            first = next(filter(str.strip, iter(partial(file.readline, HEAD_BYTES), "")), "")
            if named := SEPARATOR_LINE.fullmatch(first):
                delimiter = delimiter or named[1]
            delimiter = delimiter or separator_of(first, SEPARATORS[path.suffix.lower() == ".tsv"])
            file.seek(0)
            rows = csv.reader(_lines(file, name), delimiter=delimiter, strict=True)
            header = next(filter(None, rows), [])
            _check_header(header, name)
            start = rows.line_num + 1
            for cells in rows:
                origin, start = f"{name}:{start}", rows.line_num + 1
                if len(cells) == len(header):
                    yield origin, dict(zip(header, cells, strict=True))
                elif cells:
                    broken(origin, _wrong_number(header, cells, origin))
        except csv.Error as error:
            advice = next((advice for what, advice in QUOTES.items() if what in str(error)), "")
            broken(f"{name}:{start}", RecordsError(f"{name}:{start}: not CSV ({advice or error})"))
        except UnicodeDecodeError as error:
            raise not_utf8(name, error, "CSV") from None


def separator_of(header: str, usual: str) -> str:
    """The separator of a table with this header: that of most usual names, else the usual one if it separates."""

    def rank(separator: str) -> tuple[int, bool, int]:
        cells = cells_of(header, separator)
        num_known = len(KEYS.intersection(cell.strip().lower() for cell in cells))
        return num_known, separator == usual and len(cells) > 1, len(cells)

    return max((usual, *SEPARATORS), key=rank)


def cells_of(line: str, separator: str) -> list[str]:
    """The cells of a line; none if it is not one of a table."""
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:
        return []


def _lines(file: TextIO, name: str) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), ""), start=1):
        _check_length(line, f"{name}:{number}")
        yield "\n" if number == 1 and SEPARATOR_LINE.fullmatch(line) else line


def _check_header(header: list[str], name: str) -> None:
    if header.count("") > 1:
        numbers = listed([str(number) for number, column in enumerate(header, start=1) if not column])
        raise RecordsError(f"{name}:1: columns {numbers} have no names; name them in the first line, or delete them")
    if twice := [column for column, number in Counter(header).items() if number > 1]:
        raise RecordsError(
            f"{name}:1: two columns are called {shown(twice[0])!r}; expected different names, so rename one"
        )


def _wrong_number(header: list[str], cells: list[str], origin: str) -> RecordsError:
    return RecordsError(
        f"{origin}: expected {len(header)} cells as in the header, got {len(cells)}; are commas quoted?"
    )
