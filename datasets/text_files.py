"""Text files of rows: JSONL, JSON arrays and CSV, read and written; and what else a file is that does not hold records.

Design: each row comes with its origin, "train.jsonl:12". JSONL and CSV are read line by line. The text of an array is
in memory and one record at a time is decoded; its records are counted from 1 ("train.json: record 12"), since all of
them may be on one line. Lines end at line feeds only; U+2028 and similar characters are part of a text. CSV is that of
Python and spreadsheets (RFC 4180), with a header; all cells are texts. Spreadsheets write semicolons in many countries,
so the header decides on the separator.

The first row that cannot be read is an error, or `broken` takes it and reading continues with the next row. After wrong
JSON in an array, or wrong quotes in CSV, the next row cannot be found, and reading ends.

Files that people have in place of records (a folder, an archive, another encoding) are named, each with the command
that makes records of it. Nothing is converted on the way, so what is trained on is the file that was checked.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, AnyStr, Literal

from lookonce.datasets.formats.record import KEYS, QUESTION_NAMES, Row, is_utf8, rename_advice
from lookonce.datasets.formats.record import shown as value_shown
from lookonce.errors import RecordsError
from lookonce.files import open_regular
from lookonce.text import listed, quoted, shell, shown

Rows = Generator[tuple[str, Any], None, None]
"""The origin of each row for messages, and its value."""
Broken = Callable[[str, RecordsError], None]
"""Takes the origin of a row that cannot be read, and the error; the row is skipped unless this raises."""
HEAD_BYTES = 4096
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SPACE = re.compile(r"[ \t\r\n]*")
SEPARATORS = (",", "\t", ";", "|")
"""Separators of cells; a header has most of its own."""
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


def refuse(origin: str, error: RecordsError) -> None:
    """Raise the error: the first row that cannot be read ends the reading."""
    raise error from None


def read_jsonl(path: Path, name: str | None = None, broken: Broken = refuse) -> Rows:
    """One value per line; blank lines are skipped. `name` replaces the path in messages, also below."""
    name = name or str(path)
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, name), start=1):
            origin, line = f"{name}:{number}", line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if not line.strip():
                continue
            try:
                text = line.removesuffix(b"\n").decode()
                with _naming(origin):
                    value = DECODER.decode(text)
            except UnicodeDecodeError as error:
                broken(origin, not_utf8(f"{origin}:", error, "JSONL"))
            except RecordsError as error:
                broken(origin, error)
            else:
                yield origin, value


def _lines(file: IO[AnyStr], name: str) -> Iterator[AnyStr]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) >= MAX_LINE_BYTES:
            raise RecordsError(
                f"{name}:{number}: the line is longer than {MAX_LINE_BYTES:,} bytes; is this a text file?"
            )
        yield line


def not_utf8(place: str, error: UnicodeDecodeError, kind: str) -> RecordsError:
    """The error of a file, or a line of one, that is not in UTF-8."""
    advice = "convert one that was written on Windows with: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
    return RecordsError(f"{place} cannot be read ({error}); expected a {kind} file in UTF-8; {advice}")


@contextlib.contextmanager
def _naming(origin: str, place: str = "column {0.colno}") -> Iterator[None]:
    """Within this context, an error of the JSON decoder becomes a RecordsError that names the record."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise RecordsError(f"{origin}: not JSON ({error.msg} at {place.format(error)})") from None
    except (ValueError, RecursionError) as error:  # too many digits or too deep nesting
        raise RecordsError(f"{origin}: not JSON that can be read ({error})") from None


def read_array(path: Path, name: str | None = None, broken: Broken = refuse) -> Rows:
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
            with _naming(origin, "line {0.lineno}, column {0.colno}"):
                value, end = DECODER.raw_decode(text, position)
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


def _skip_space(text: str, position: int) -> int:
    match = SPACE.match(text, position)
    assert match is not None
    return match.end()


def read_csv(path: Path, name: str | None = None, delimiter: str | None = None, broken: Broken = refuse) -> Rows:
    """The cells of each row by the names in the header; blank lines are skipped.

    `delimiter` is by default the one that separates the usual names in the header, or the most names.
    """
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    name, start = name or str(path), 1
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            first = next(filter(str.strip, iter(partial(file.readline, HEAD_BYTES), "")), "")
            delimiter = delimiter or max(SEPARATORS, key=partial(_separated, first))
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
                    numbers = f"expected {len(header)} cells as in the header, got {len(cells)}"
                    broken(origin, RecordsError(f"{origin}: {numbers}; are commas quoted?"))
        except csv.Error as error:
            advice = next((advice for fragment, advice in QUOTES.items() if fragment in str(error)), "")
            broken(f"{name}:{start}", RecordsError(f"{name}:{start}: not CSV ({advice or error})"))
        except UnicodeDecodeError as error:
            raise not_utf8(name, error, "CSV") from None


def _separated(header: str, mark: str) -> tuple[int, int]:
    """How many usual names a mark separates in the first line of a table, and how many cells outside of quotes."""
    cells = re.sub(r'"[^"]*"', "", header).split(mark)
    return len(KEYS & {cell.strip(' "\r\n') for cell in header.split(mark)}), len(cells)


def _check_header(header: list[str], name: str) -> None:
    if header.count("") > 1:
        numbers = listed([str(number) for number, column in enumerate(header, start=1) if not column])
        raise RecordsError(f"{name}:1: columns {numbers} have no names; name them in the first line, or delete them")
    if twice := [column for column, number in Counter(header).items() if number > 1]:
        raise RecordsError(
            f"{name}:1: two columns are called {shown(twice[0])!r}; expected different names, so rename one"
        )


Kind = Literal["jsonl", "array", "table", "parquet"]
TABLES = (".csv", ".tsv")
COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
"""The first bytes of compressed files, and the command that decompresses them."""
OTHERS = {
    b"PK\x03\x04": (
        "a zip archive or an Excel workbook",
        "unpack an archive with unzip, save a workbook as CSV in UTF-8",
    ),
    b"ARROW1": ("an Arrow file", "write it as parquet, with save_to_disk replaced by to_parquet"),
    b"version https://git-lfs": ("a pointer of Git LFS in place of the file", "download the file with: git lfs pull"),
    b"<!doctype html": ("an HTML page", "download the file itself; a dataset of the Hub may need `hf auth login`"),
}
"""The first bytes, in lower case, of other files, what these are and what to do."""


def kind_of_file(path: Path) -> Kind:
    """The kind of a records file.

    Raises:
        RecordsError: it is something else; says what, and what to do.
        FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        raise RecordsError(f"cannot read {path}: {folder_in_place(path)}")
    try:
        with open_regular(path) as file:
            head = file.read(HEAD_BYTES)
    except ValueError as error:  # a device or a FIFO, which cannot be read twice
        raise RecordsError(str(error)) from None
    if head.startswith(b"PAR1"):
        return "parquet"
    _refuse_other_types(path, head)
    start = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    is_json = start.startswith((b"[", b"{"))
    if path.suffix.lower() == ".parquet" and head:
        raise RecordsError(f"{path} is not a parquet file, in spite of its name; it begins with {_shown(start)}")
    if path.suffix.lower() in TABLES and not is_json:
        return "table"
    if start.startswith(b"["):
        return "array"
    if not is_json and _is_header(start):
        raise RecordsError(f"{path} is a table, beginning with {_shown(start)}; give its name the suffix .csv or .tsv")
    if _goes_over_lines(start):
        command = f"{shell('jq', '-c', '.', path)} > NEW.jsonl"
        raise RecordsError(f"{path}: its JSON objects go over several lines; write one object a line, with: {command}")
    return "jsonl"


def folder_in_place(path: Path) -> str:
    """What to say of a folder in place of a records file."""
    names = sorted(
        file.name for file in path.iterdir() if file.suffix.lower() in (".jsonl", ".json", ".parquet", *TABLES)
    )
    inside = f"name a file in it: {listed(names, 3)}" if names else "name a records file"
    return f"it is a folder; {inside}, or make records of it with: lookonce data prepare"


def _refuse_other_types(path: Path, head: bytes) -> None:
    for magic, command in COMPRESSED.items():
        if head.startswith(magic):
            raise RecordsError(f"{path} is compressed; unpack it, for example with: {command} --keep {shell(path)}")
    for magic, (kind, advice) in OTHERS.items():
        if head.lstrip()[: len(magic)].lower() == magic.lower():
            raise RecordsError(f"{path} is {kind}; {advice}")
    if head.count(b"\0") > 0.4 * len(head):
        kind = "CSV" if path.suffix.lower() in TABLES else "JSONL"
        raise RecordsError(
            f"{path}:1: cannot be read (it has zero bytes, as UTF-16 or another type of file); expected a {kind} "
            f"file in UTF-8; convert a text with: iconv -f UTF-16 -t UTF-8 {shell(path)} > NEW"
        )


def _is_header(start: bytes) -> bool:
    """Whether a text begins with a line of names, one of which is usual for a question."""
    cells = re.split(r"[,;|\t]", start.partition(b"\n")[0].decode("utf-8", "replace").strip())
    return len(cells) > 1 and not {*QUESTION_NAMES}.isdisjoint(cells)


def _goes_over_lines(start: bytes) -> bool:
    """Whether a JSON object begins whose first line is not its last."""
    line, _, later_lines = start.partition(b"\n")
    return start.startswith(b"{") and bool(later_lines) and line.rstrip().endswith((b"{", b"[", b","))


def _shown(start: bytes) -> str:
    return quoted(start.partition(b"\n")[0][:40].decode("utf-8", "replace"))


FORMULA = re.compile(r"'*(\s*[=+\-@]|[\t\r\n])")
"""How a cell begins that a spreadsheet takes for a formula, or, after apostrophes, one that is marked as text."""
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
Named = Iterable[tuple[str, Row]]
"""Rows to write, and what to call each in a message."""


def read_cells(path: Path, name: str | None = None, delimiter: str | None = None, broken: Broken = refuse) -> Rows:
    """As `read_csv`, for cells that `safe_cell` may have written."""
    for origin, cells in read_csv(path, name, delimiter, broken):
        yield origin, {from_cell(column): from_cell(cell) for column, cell in cells.items()}


def read_table(path: Path, delimiter: str | None = None, broken: Broken = refuse) -> Rows:
    """A record per row of CSV; an empty cell is a key that the record does not have."""
    for origin, cells in read_cells(path, delimiter=delimiter, broken=broken):
        if not set(QUESTION_NAMES) & set(cells):
            got = f"{value_shown(list(cells))}{rename_advice(cells)}; the first line of a table must name its columns"
            error = RecordsError(f"{path}:1: no column is called `{QUESTION_NAMES[0]}`, got {got}")
            return broken(f"{path}:1", error)
        yield origin, {name: cell for name, cell in cells.items() if cell}


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
    """A row as JSON; raises RecordsError if a value has no JSON type, or a text is not valid UTF-8."""
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
