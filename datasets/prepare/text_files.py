"""The rows of CSV, JSON and JSONL files, and of text files with a line a question.

Design: strict, as records are: what is not just so is named with its file and line. JSON that is one list is read
whole; all else is streamed. A stream that is gone on with is parsed again from its beginning, which takes seconds.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare import chunks as portions
from lookonce.datasets.prepare.chunks import Portion, RawRow, broken
from lookonce.datasets.prepare.definition import Definition, TextSection
from lookonce.errors import RecordsError


def read_csv(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """A CSV file with a header."""

    def rows() -> Iterator[RawRow]:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file, strict=True)
            for values in lines:
                if None in values or None in values.values():
                    wanted = f"{len(lines.fieldnames or [])} columns as its header has"
                    raise RecordsError(f"{name}:{lines.line_num}: expected {wanted}, got {list(values.values())!r}")
                yield RawRow(dict(values), None, f"{name}:{lines.line_num}")

    return _cut(name, rows())


def read_json(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """JSONL, or one JSON list of objects."""

    def rows() -> Iterator[RawRow]:
        with path.open(encoding="utf-8-sig") as file:
            start = file.read(1)
            while start.isspace():
                start = file.read(1)
            file.seek(0)
            if start == "[":
                yield from (_row(value, f"{name}, entry {number}") for number, value in enumerate(json.load(file), 1))
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _row(parse_json(line, f"{name}:{number}"), f"{name}:{number}")

    return _cut(name, rows())


def parse_json(line: str, origin: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordsError(f"{origin}: not JSON ({error}); expected one object a line") from None


def _row(value: Any, origin: str) -> RawRow:
    if not isinstance(value, dict):
        raise RecordsError(f"{origin}: expected a JSON object, got {type(value).__name__}")
    return RawRow(value, None, origin)


def _cut(name: str, rows: Iterator[RawRow]) -> Iterator[Portion]:
    """Portions of a stream; errors of the file are told with its name."""
    first = 0
    while True:
        try:
            some = list(islice(rows, portions.PORTION_ROWS))
        except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
            raise error if isinstance(error, RecordsError) else broken(name, error) from None
        if not some:
            return
        yield Portion(f"{name}, row {first}", some.copy, len(some))
        first += len(some)


def read_text(path: Path, name: str, definition: Definition) -> Iterator[Portion]:
    """A file of `question|answer` lines about one image, which the path names."""
    section = definition.text
    assert section is not None
    fields = field_values(section, name)

    def rows() -> Iterator[RawRow]:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield RawRow(
                        fields | _question_and_answer(line, section, f"{name}:{number}"), None, f"{name}:{number}"
                    )

    return _cut(name, rows())


def field_values(section: TextSection, name: str) -> dict[str, str]:
    """What a file's path says, with the image and its name that follow from it; empty if it is no such file."""
    pieces = re.split(r"\{(\w+)\}", section.files)
    expression = "".join(
        re.escape(piece).replace(r"\*", "[^/]*") if number % 2 == 0 else f"(?P<{piece}>[^/]+?)"
        for number, piece in enumerate(pieces)
    )
    found = re.fullmatch(f"(?:.*/)?{expression}", name)
    if found is None:
        return {}
    fields = found.groupdict()
    start = name[: len(name) - len(_tail(name, section.files))]
    return fields | {"image": start + section.image.format(**fields), "image_id": section.image_id.format(**fields)}


def _tail(name: str, pattern: str) -> str:
    return "/".join(name.split("/")[-len(pattern.split("/")) :])


def _question_and_answer(line: str, section: TextSection, origin: str) -> dict[str, str]:
    parts = line.rstrip("\r\n").split(section.separator)
    if len(parts) != 2:
        raise RecordsError(f"{origin}: expected question{section.separator}answer, got {line.strip()!r}")
    return {"question": parts[0], "answer": parts[1]}
