"""Text files of rows, and what kind of file it is."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import Result
from pyarrow import parquet
from support.rows import png, write_lines
from support.rows import run as run_command

from lookonce.datasets.records import read_records
from lookonce.datasets.text_files import read_array, read_csv, read_jsonl
from lookonce.errors import RecordsError

ROWS = [{"a": "1", "b": "x, y"}, {"a": "", "b": 'a "quote"\nand a line'}, {"a": "\u2028", "b": "é"}]
READERS: dict[str, tuple[Callable[..., Any], str, list[str]]] = {
    "CSV": (read_csv, 'a,b\n1,"x, y"\n,"a ""quote""\nand a line"\n\n\u2028,é\n', [":2", ":3", ":6"]),
    "JSONL": (read_jsonl, "\n".join([json.dumps(ROWS[0]), "", *map(json.dumps, ROWS[1:])]), [":1", ":3", ":4"]),
    "array": (read_array, json.dumps(ROWS, indent=1, ensure_ascii=False), [": record 1", ": record 2", ": record 3"]),
}


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "BOM"])
@pytest.mark.parametrize(("read", "text", "places"), READERS.values(), ids=READERS)
def test_rows_come_with_their_place(tmp_path, read, text, places, mark):
    path = tmp_path / "a.txt"
    path.write_text(mark + text, encoding="utf-8", newline="")
    assert list(read(path)) == [(f"{path}{place}", row) for place, row in zip(places, ROWS, strict=True)]
    assert [origin for origin, _ in read(path, "name")] == [f"name{place}" for place in places]


GOOD = json.dumps({"image_filename": "a.jpg", "question": "Q", "answer": "A"})
HEADER, AFTER = "image,question,answer\n", "expected a comma or ] after record"
MALFORMED = [
    ("csv", f"{HEADER}a.jpg,Is it, so?,yes\n", ":2: expected 3 cells as in the header, got 4; are commas quoted?"),
    ("csv", "image,question,question\n", ":1: two columns are called 'question'"),
    ("csv", f'{HEADER}a.jpg,"Q"q,A\n', ":2: not CSV"),
    ("csv", f"{HEADER}a.jpg,,A\n", ":2: expected"),
    ("csv", HEADER, " has no records; expected one JSON object per line"),
    ("parquet", "", " has no records; expected one JSON object per line"),
    ("jsonl", f"{GOOD}\n{{\n", ":2: not JSON (Expecting property name"),
    ("json", " [ ] ", " has no records; expected one JSON object per line, an array of them, CSV"),
    ("json", f"[\n{GOOD},\n{{", ": record 2: not JSON (Expecting property name enclosed in double quotes at line 3, c"),
    ("json", "[" * 100_000, ": record 1: not JSON that can be read"),
    ("json", f"[{GOOD}", f": {AFTER} 1; is the file cut off?"),
    ("json", f"[{GOOD},]", ": record 2: not JSON (Expecting value"),
    ("json", f"[{GOOD}]\n[{GOOD}]", ": text after the end of the array"),
]


@pytest.mark.parametrize(("suffix", "content", "message"), MALFORMED)
def test_malformed_files_are_refused_with_name_and_line(tmp_path, suffix, content, message):
    path = tmp_path / f"train.{suffix}"
    path.write_text(content)
    if suffix == "parquet":
        parquet.write_table(pa.table({"question": pa.array([], pa.string())}), path)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert str(refusal.value).removeprefix(str(path)).startswith(message)


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
def test_reading_continues_after_unreadable_rows_if_the_next_has_a_known_place(tmp_path, read, text, kept, places):
    (tmp_path / "a.txt").write_bytes(text.encode("latin-1"))
    broken: list[tuple[str, RecordsError]] = []
    rows = list(read(tmp_path / "a.txt", "name", broken=lambda *found: broken.append(found)))
    assert (len(rows), [origin for origin, _ in broken]) == (kept, places)
    assert all(str(error).startswith(f"{origin}: ") for origin, error in broken)


ROW = {"image": "a.png", "question": "Où est-ce?", "answer": "à gauche"}
TABLE = "image,question,answer\na.png,Où est-ce?,à gauche\n"
LINE = json.dumps(ROW, ensure_ascii=False) + "\n"
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "UTF-16": ("r.csv", TABLE.encode("utf-16"), "it has zero bytes, as UTF-16 or another type of file); expected a"),
    "UTF-16 without a mark": ("r.jsonl", LINE.encode("utf-16-le"), "with: iconv -f UTF-16 -t UTF-8 r.jsonl > NEW"),
    "cp1252 table": ("r.csv", TABLE.encode("cp1252"), "expected a CSV file in UTF-8; convert one that was"),
    "cp1252 array": ("r.json", f"[{LINE}]".encode("cp1252"), "iconv -f WINDOWS-1252 -t UTF-8"),
    "gzip": ("r.jsonl", gzip.compress(LINE.encode()), "is compressed; unpack it, for example with: gunzip --keep"),
    "workbook": ("r.xlsx", b"PK\x03\x04", "is a zip archive or an Excel workbook; unpack an archive"),
    "pretty-printed records": ("r.jsonl", 2 * json.dumps(ROW, indent=1).encode(), "with: jq -c . r.jsonl > NEW.jsonl"),
    "table with another name": ("r.jsonl", TABLE.encode(), "give its name the suffix .csv or .tsv"),
    "no parquet": ("r.parquet", TABLE.encode(), "is not a parquet file, in spite of its name; it begins with"),
    "commas after lines": ("r.jsonl", 2 * LINE.replace("}", "},").encode(), "go over several lines"),
    "pointer": ("r.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "page": ("r.jsonl", b"<!DOCTYPE html>\n<html>", "is an HTML page; download the file itself"),
    "empty": ("r.jsonl", b"", "has no r"),
    "blank": ("r.csv", b"\n\n", "has no r"),
}  # fmt: skip
READ: dict[str, tuple[str, bytes]] = {
    "semicolons": ("r.csv", TABLE.replace(",", ";").encode()),
    "tabs": ("r.csv", TABLE.replace(",", "\t").encode()),
    "a comma within semicolons": ("r.csv", "image;question;answer;a, b\na.png;Où est-ce?;à gauche;x, y\n".encode()),
    "semicolons within a name": ("r.csv", "image,question,answer,a;b;c;d\na.png,Où est-ce?,à gauche,x\n".encode()),
    "commas within a name": ("r.tsv", "image\tquestion\tanswer\ta,b,c,d\na.png\tOù est-ce?\tà gauche\tx\n".encode()),
    "mark of bytes": ("r.csv", TABLE.encode("utf-8-sig")),
    "mark of an array": ("r.json", f"[{LINE}]".encode("utf-8-sig")),
    "line ends of Windows": ("r.csv", TABLE.replace("\n", "\r\n").encode()),
    "JSON with the name of a table": ("r.csv", LINE.encode()),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line in a folder with an image and the definition of a dataset."""
    monkeypatch.chdir(tmp_path)
    Path("a.png").write_bytes(png())
    Path("my.yaml").write_text("name: my\n")
    return run_command


@pytest.mark.parametrize(("name", "content", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_another_file_is_named_with_what_to_do(run, name, content, says):
    Path(name).write_bytes(content)
    for words in (
        ("data", "convert", name, "o.jsonl"),
        ("data", "audit", name, "--strict"),
        ("data", "prepare", "my.yaml", "out", "--source", name),
        ("init", "run.yaml", "--model", "none/none", "--train", name, "--yes"),
    ):
        result = run(*words)
        assert result.exit_code == 1 and "unexpected" not in result.output, result.output
        assert says in result.output and name in result.output, result.output


@pytest.mark.parametrize(("name", "content"), READ.values(), ids=READ.keys())
def test_what_is_plain_is_read(run, name, content):
    Path(name).write_bytes(content)
    assert run("data", "convert", name, "o.jsonl").exit_code == 0
    prepared = run("data", "prepare", "my.yaml", "out", "--source", name)
    assert prepared.exit_code == 0, prepared.output
    for path in (Path("o.jsonl"), Path("out/train.jsonl")):
        [record] = read_records(path)
        assert (record.turns[0].question, record.turns[0].answer) == ("Où est-ce?", "à gauche")


HEADERS = {
    "capitals": ("Image,Question,Answer", "rename `Image` to `image`, `Question` to `question`, `Answer` to `answer`"),
    "spaces": ("image, question, answer", "rename ` question` to `question`, ` answer` to `answer`"),
    "none": ("a.png,What?,yes", "no column is called `question`, got ['a.png', 'What?', 'yes']; the first line of a"),
    "no names": ("image,question,answer,,", "columns 4, 5 have no names; name them in the first line, or delete them"),
    "a name twice": ("image,question,answer,answer", "two columns are called 'answer'; expected different names"),
    "an open quote": ('image,question,"answer', "a cell begins with a quote and no quote ends it"),
}


@pytest.mark.parametrize(("header", "says"), HEADERS.values(), ids=HEADERS.keys())
def test_a_header_is_refused_with_what_to_rename(run, header, says):
    Path("r.csv").write_text(f"{header}\n{','.join(['a.png'] * (header.count(',') + 1))}\n")
    result = run("data", "convert", "r.csv", "o.jsonl")
    assert result.exit_code == 1 and says in result.stderr and "r.csv:" in result.stderr, result.output
    assert "unexpected" not in result.stderr


def test_a_folder_is_named_with_the_files_in_it(run):
    Path("rows").mkdir()
    Path("rows/train.jsonl").write_text(LINE)
    Path("run.yaml").write_text("model: {path: none}\ndata: {train: rows}\noutput: out\n")
    for words in (
        ("data", "convert", "rows", "o.jsonl"),
        ("data", "audit", "rows"),
        ("check", "run.yaml", "--json"),
        ("init", "r.yaml", "--model", "none/none", "--train", "rows", "--yes"),
    ):
        result = run(*words)
        assert result.exit_code in (1, 2) and "it is a folder; name a file in it: train.jsonl" in result.output


FORMULAS = [*("=1+1 @SUM(A1) -2+3 '=1 ''@x = -".split()), "+cmd|' /C calc'!A0", "\t=1", "\r=1", "\n=1", " =1", "- none"]
PLAIN = ["-5", "+1.5e-3", "-.5", "a=b", "'quoted'", "5 - 3", "o'clock", "\u2212 5"]


@pytest.mark.guarantee("No cell of a CSV file is a formula, and each cell reads back as the same text.")
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_cell_is_never_a_formula_and_reads_back_as_the_same_text(tmp_path, suffix):
    """Through the commands: converted to a table and back, the records are the same; numbers stay numbers."""
    asked = [{"question": f"{value}?", "answer": value, "=key": value} for value in FORMULAS + PLAIN]
    rows, table, again = tmp_path / "rows.jsonl", tmp_path / f"table{suffix}", tmp_path / "again.jsonl"
    write_lines(rows, *({"image_filename": "a.jpg", **row, "number": -5} for row in asked))
    for source, target in ((rows, table), (table, again)):
        done = run_command("data", "convert", source, target, "--to", "flat")
        assert done.exit_code == 0, done.output
    with table.open(newline="") as file:
        header, *cells = csv.reader(file, delimiter="\t" if suffix == ".tsv" else ",")
    answers = [row[header.index("answer")] for row in cells]
    assert answers == [f"'{value}" for value in FORMULAS] + PLAIN
    assert "'=key" in header and {row[header.index("number")] for row in cells} == {"-5"}
    found = [json.loads(line) for line in again.read_text().splitlines()]
    assert [{key: row[key] for key in asked[0]} for row in found] == asked


def test_a_table_of_very_many_columns_is_read_at_once(tmp_path):
    names = ["image_filename", "question", "answer", *(f"column{number}" for number in range(50_000))]
    path = tmp_path / "wide.csv"
    path.write_text(f"{','.join(names)}\n{','.join(['x'] * len(names))}\n")
    assert len(read_records(path)[0].metadata) == 50_000
