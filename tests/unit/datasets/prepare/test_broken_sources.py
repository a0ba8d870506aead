"""Broken files and paths without rows are refused with their names."""

from __future__ import annotations

from pathlib import Path

import pytest
from webdataset import TarWriter

from lookonce.datasets.prepare.run import Options, Prepared, prepare
from lookonce.errors import LookonceError, RecordsError, SourceError


def made(folder: Path, source: Path, **options) -> Prepared:
    return prepare("kvasir-vqa", folder, Options(source=str(source), **options))


BROKEN = {
    "cut parquet": ("a.parquet", b"PAR1 and no end", "a.parquet cannot be read"),
    "cut JSONL": ("a.jsonl", b'{"question": "a"\n', "a.jsonl:1: not JSON"),
    "JSONL of lists": ("a.jsonl", b"[1]\n[2]\n", "a.jsonl: record 1: expected a JSON object, got int"),
    "JSON of numbers": ("a.json", b"[1, 2]", "a.json: record 1: expected a JSON object, got int"),
    "other columns": ("a.jsonl", b'{"q": "a", "answer": "b"}\n', "a.jsonl:1: expected a column `question`, got"),
    "no answer": ("a.jsonl", b'{"question": "a"}\n', "name it in the dataset's YAML file: columns: {answer"),
    "latin-1": ("a.csv", "question,answer\nOù,là\n".encode("latin-1"), "a.csv cannot be read"),
    "short line": ("a.csv", b"question,answer\na,b\nc\n", "a.csv:3: expected 2 cells as in the header, got 1"),
    "long line": ("a.csv", b"question,answer\na,b,c\n", "a.csv:2: expected 2 cells as in the header, got 3"),
    "no tar": ("a.tar", b"x" * 2000, "a.tar cannot be read"),
}


@pytest.mark.parametrize(("name", "data", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_named_with_the_line(tmp_path, name, data, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    with pytest.raises(RecordsError) as refusal:
        made(tmp_path / "out", tmp_path / "in")
    assert message in str(refusal.value)


def test_a_parquet_file_that_is_damaged_inside_is_named(tmp_path, write_source):
    write_source(tmp_path / "in" / "data", compression="none", use_dictionary=False)
    path = tmp_path / "in" / "data" / "00001.parquet"
    data = bytearray(path.read_bytes())
    data[10:400] = b"\xff" * 390
    path.write_bytes(data)
    with pytest.raises(RecordsError, match=r"data/00001.parquet cannot be read"):
        made(tmp_path / "out", tmp_path / "in")


def test_a_tar_file_without_questions_is_refused(tmp_path):
    (tmp_path / "in").mkdir()
    with TarWriter(str(tmp_path / "in" / "a.tar")) as writer:
        writer.write({"__key__": "a", "jpg": b"x"})
    with pytest.raises(SourceError, match="has no parquet"):
        made(tmp_path / "out", tmp_path / "in")
    with TarWriter(str(tmp_path / "in" / "a.tar")) as writer:
        writer.write({"__key__": "a", "jpg": b"x", "json": {"question": "Is there text?", "answer": "no"}})
        writer.write({"__key__": "b", "jpg": b"x"})
    with pytest.raises(RecordsError, match=r"a.tar/b: expected a .json member with its questions, got \['jpg'\]"):
        made(tmp_path / "out", tmp_path / "in")


NOWHERE: dict[str, tuple[str, type[LookonceError], str]] = {
    "missing": ("gone", SourceError, "nothing exists at"),
    "empty folder": (".", SourceError, "has no parquet, WebDataset tar, CSV, JSONL or JSON files with questions"),
    "another file": ("a.txt", SourceError, "has no parquet"),
}


@pytest.mark.parametrize(("name", "kind", "message"), NOWHERE.values(), ids=NOWHERE)
def test_a_path_without_rows_is_refused(tmp_path, name, kind, message):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(kind, match=message):
        made(tmp_path / "out", tmp_path / name)
