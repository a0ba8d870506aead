"""What kind of file holds records, and what else a file is that does not.

Design: a file is recognised by its first bytes, and a table also by its name, since a table begins with any text. Files
that people have in place of records are named, each with the command that makes records of it: a folder, an archive, a
workbook, another encoding, JSON over several lines. Nothing is converted on the way, so what is trained on is the file
that was checked. The separator of a table follows from its header.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lookonce.datasets.readers.image_column import QUESTION_NAMES
from lookonce.datasets.readers.tar import COMPRESSED
from lookonce.datasets.readers.text import (
    BYTE_ORDER_MARK,
    cells_of,
    is_array,
    is_json,
    read_head,
    separator_of,
)
from lookonce.errors import RecordsError
from lookonce.text import listed, quoted, shell

Kind = Literal["jsonl", "array", "table", "parquet"]
PARQUET_MAGIC = b"PAR1"
TABLES = (".csv", ".tsv")
ENCODINGS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Marks at the beginning of texts in other encodings; that of UTF-32 begins with that of UTF-16."""
OTHERS = {
    b"PK\x03\x04": ("a zip archive", "unpack it with: unzip {path}"),
    b"7z\xbc\xaf": ("a 7z archive", "unpack it with: 7z x {path}"),
    b"\xd0\xcf\x11\xe0": ("an old Excel workbook (.xls)", "save it as CSV in UTF-8"),
    b"PK\x05\x06": ("an empty zip archive", "name a file of records"),
    b"Rar!": ("a RAR archive", "unpack it with: unrar x {path}"),
    b"%PDF": ("a PDF file", "name a file of records"),
    b"\xff\xd8\xff": ("a JPEG image", "name a file of records"),
    b"\x89PNG": ("a PNG image", "name a file of records"),
    b"\x89HDF": ("an HDF5 file", "write its rows as JSONL or parquet"),
    b"\x93NUMPY": ("an array of NumPy", "write its rows as JSONL or parquet"),
    b"\x80\x04\x95": ("a pickle of Python", "write its rows as JSONL or parquet"),
    b"SQLite format 3\0": ("an SQLite database", "write its rows as JSONL or CSV"),
    b"\xff\xff\xff\xff": ("an Arrow file", "write it as parquet, with save_to_disk replaced by to_parquet"),
    b"ARROW1": ("an Arrow file", "write it as parquet, with save_to_disk replaced by to_parquet"),
    b"version https://git-lfs": ("a pointer of Git LFS in place of the file", "download the file with: git lfs pull"),
    b"<!doctype html": ("an HTML page", "download the file itself; a dataset of the Hub may need `hf auth login`"),
    b"<html": ("an HTML page", "download the file itself; a dataset of the Hub may need `hf auth login`"),
}  # fmt: skip
"""The first bytes, in lower case, of other files, what these are and what to do."""
WORKBOOKS = {
    b"opendocument.spreadsheet": "a LibreOffice workbook",
    b"xl/": "an Excel workbook",
    b"[Content_Types].xml": "an Excel workbook",
}
"""What the first bytes of a workbook hold."""
TAR_MAGIC = slice(257, 262)
RECORD_KEYS = ("turns", "conversations", "messages", "images")
"""Keys whose value is a list in a record itself."""
MAX_PARSED = 1 << 26
"""The most characters of a file that are parsed for a message."""


def kind_of_file(path: Path) -> Kind:
    """The kind of a records file.

    Raises:
        RecordsError: it is something else; says what, and what to do.
        FileNotFoundError: there is no such file.
    """
    if path.is_dir():
        raise RecordsError(f"cannot read {path}: {folder_in_place(path)}")
    head = read_head(path)
    if head.startswith(PARQUET_MAGIC):
        return "parquet"
    _refuse_others(path, head)
    start = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if path.suffix.lower() == ".parquet" and head:
        raise RecordsError(f"{path} is not a parquet file, in spite of its name; it begins with {_shown(start)}")
    if path.suffix.lower() in TABLES and not is_json(head):
        return "table"
    if is_array(head):
        return "array"
    if not is_json(head) and _is_header(start):
        raise RecordsError(f"{path} is a table, beginning with {_shown(start)}; give its name the suffix .csv or .tsv")
    if _ends_with_comma(start):
        command = f"sed 's/,[[:space:]]*$//' {shell(path)} > NEW.jsonl"
        raise RecordsError(f"{path}: its lines end with commas; write one object a line, with: {command}")
    if _goes_over_lines(start):
        raise RecordsError(_over_lines(path))
    return "jsonl"


def folder_in_place(path: Path) -> str:
    """What to say of a folder in place of a records file."""
    names = sorted(one.name for one in path.iterdir() if one.suffix.lower() in (".jsonl", ".json", ".parquet", *TABLES))
    inside = f"name a file in it: {listed(names, 3)}" if names else "name a records file"
    return f"it is a folder; {inside}, or make records of it with: lookonce data prepare"


def _refuse_others(path: Path, head: bytes) -> None:
    for magic, command in COMPRESSED.items():
        if head.startswith(magic):
            raise RecordsError(f"{path} is compressed; unpack it, for example with: {command} --keep {shell(path)}")
    if head.startswith(b"PK\x03\x04") and (what := next((WORKBOOKS[one] for one in WORKBOOKS if one in head), "")):
        raise RecordsError(f"{path} is {what}; save it as CSV in UTF-8")
    for magic, (what, advice) in OTHERS.items():
        if head.lstrip()[: len(magic)].lower() == magic.lower():
            raise RecordsError(f"{path} is {what}; {advice.format(path=shell(path))}")
    if head[TAR_MAGIC] == b"ustar":
        raise RecordsError(f"{path} is a tar archive; make records of its samples with: lookonce data prepare")
    encoding = next((name for mark, name in ENCODINGS.items() if head.startswith(mark)), "")
    zeros = [head[start::2].count(b"\0") for start in (0, 1)]
    if encoding or (len(head) / 4 < sum(zeros) <= len(head) * 0.6 and min(zeros) < max(zeros) / 9):  # else: damage
        encoding = encoding or ("UTF-16LE" if head[1:2] == b"\0" else "UTF-16BE")
        kind = "CSV" if path.suffix.lower() in TABLES else "JSONL"
        advice = f"expected a {kind} file in UTF-8; convert it with: iconv -f {encoding} -t UTF-8 {shell(path)} > NEW"
        raise RecordsError(f"{path}:1: cannot be read (it is in {encoding}); {advice}")


def _is_header(start: bytes) -> bool:
    """Whether a text begins with a line of names, one of which is usual for a question."""
    line = start.partition(b"\n")[0].decode("utf-8", "replace")
    cells = cells_of(line.strip(), separator_of(line, ","))
    return len(cells) > 1 and not {*QUESTION_NAMES}.isdisjoint(cells)


def _goes_over_lines(start: bytes) -> bool:
    """Whether a JSON object begins whose first line is not its last."""
    line, _, others = start.partition(b"\n")
    return start.startswith(b"{") and bool(others) and line.rstrip().endswith((b"{", b"[", b","))


def _ends_with_comma(start: bytes) -> bool:
    """Whether the first line is an object with a comma after it."""
    line = start.partition(b"\n")[0].rstrip()
    if not (line.startswith(b"{") and line.endswith(b"},")):
        return False
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(line[:-1]), dict)
    return False


def _over_lines(path: Path) -> str:
    """What to say of objects over several lines."""
    selected = "."
    with path.open(encoding="utf-8-sig", errors="replace") as file, contextlib.suppress(ValueError, RecursionError):
        value = json.loads(file.read(MAX_PARSED))
        selected = f".{inner}[]" if (inner := records_inside(value)) else "."
    command = f"{shell('jq', '-c', selected, path)} > NEW.jsonl"
    return f"{path}: its JSON objects go over several lines; write one object a line, with: {command}"


def records_inside(value: Mapping[str, Any]) -> str:
    """The key of an object that is not a record and has a list of them; empty if it is not plain which one that is."""
    lists = [key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)]
    return (
        lists[0] if len(lists) == 1 and lists[0] not in RECORD_KEYS and re.fullmatch(r"[A-Za-z_]\w*", lists[0]) else ""
    )


def _shown(start: bytes) -> str:
    return quoted(start.partition(b"\n")[0][:40].decode("utf-8", "replace"))
