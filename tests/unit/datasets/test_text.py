"""The readers of CSV, JSON arrays and JSONL: the same rows, with origins, and one error message each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.text_files import is_array, read_array, read_csv, read_jsonl
from lookonce.errors import RecordsError

ROWS = [{"a": "1", "b": "x, y"}, {"a": "", "b": 'a "quote"\nand a line'}, {"a": "\u2028", "b": "é"}]
READERS: dict[str, tuple[Callable[..., Any], str, list[str]]] = {
    "CSV": (read_csv, 'a,b\n1,"x, y"\n,"a ""quote""\nand a line"\n\n\u2028,é\n', [":2", ":3", ":6"]),
    "JSONL": (
        read_jsonl,
        "\n".join([json.dumps(ROWS[0]), "", *(json.dumps(row) for row in ROWS[1:])]),
        [":1", ":3", ":4"],
    ),
    "array": (read_array, json.dumps(ROWS, indent=1, ensure_ascii=False), [": record 1", ": record 2", ": record 3"]),
}


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "BOM"])
@pytest.mark.parametrize(("read", "text", "places"), READERS.values(), ids=READERS)
def test_rows_come_with_their_place(
    tmp_path: Path, read: Callable[..., Any], text: str, places: list[str], mark: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(mark + text, encoding="utf-8", newline="")
    assert list(read(path)) == [(f"{path}{place}", row) for place, row in zip(places, ROWS, strict=True)]
    assert [origin for origin, _ in read(path, "name")] == [f"name{place}" for place in places]


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (read_csv, "a,b\n1\n", "name:2: expected 2 cells as in the header, got 1; are commas quoted?"),
        (read_csv, "a,a\n1,2\n", "name:1: two columns are called 'a'"),
        (read_csv, 'a\n"b"c\n', "name:2: not CSV"),
        (read_jsonl, "{}\n{\n", "name:2: not JSON (Expecting property name"),
        (read_array, "[1,\n2", "name: expected a comma or ] after record 2; is the file cut off?"),
        (read_array, "[1] 2", "name: text after the end of the array"),
    ],
)
def test_malformed_files_are_refused_with_name_and_line(
    tmp_path: Path, read: Callable[..., Any], text: str, message: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(RecordsError) as refusal:
        list(read(tmp_path / "a.txt", "name"))
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize(
    ("read", "text", "kept", "places"),
    [
        (read_csv, "a,b\n1\n1,2\n1,2,3\n", 1, ["name:2", "name:4"]),
        (read_csv, 'a\n1\n"b"c\n2\n', 1, ["name:3"]),
        (read_jsonl, "{\n\n{}\n\xff\n{}\n[\n", 2, ["name:1", "name:4", "name:6"]),
        (read_array, "[1, 2, {3}, 4]", 2, ["name: record 3"]),
        (read_array, "[1, 2", 2, ["name"]),
        (read_array, "[1] 2", 1, ["name"]),
    ],
)
def test_reading_continues_after_rows_that_cannot_be_read_where_the_next_begins_is_known(
    tmp_path: Path, read: Callable[..., Any], text: str, kept: int, places: list[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode("latin-1"))
    broken: list[tuple[str, RecordsError]] = []
    rows = list(read(tmp_path / "a.txt", "name", broken=lambda *found: broken.append(found)))
    assert (len(rows), [origin for origin, _ in broken]) == (kept, places)
    assert all(str(error).startswith(f"{origin}: ") for origin, error in broken)


def test_a_large_cell_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n" + "x" * 200_000)
    assert [len(row["a"]) for _, row in read_csv(tmp_path / "a.csv")] == [200_000]


@pytest.mark.parametrize(
    ("head", "expected"), [(b" \n[", True), (b"\xef\xbb\xbf[1]", True), (b'{"a"', False), (b"", False)]
)
def test_an_array_is_recognised_by_its_first_bytes(head: bytes, expected: bool) -> None:
    assert is_array(head) is expected
