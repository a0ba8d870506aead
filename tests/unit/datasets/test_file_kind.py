"""What people have in place of a records file is named with what to do, or read where that is plain."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from lookonce.cli import main
from lookonce.datasets.records import read_records

ROW = {"image": "a.png", "question": "Où est-ce?", "answer": "à gauche"}
TABLE = "image,question,answer\na.png,Où est-ce?,à gauche\n"
LINE = json.dumps(ROW, ensure_ascii=False) + "\n"


def zipped(*names: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    return target.getvalue()


def tarred() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.json"))
    return target.getvalue()


WORKBOOK = zipped("[Content_Types].xml", "xl/workbook.xml")
REFUSED: dict[str, tuple[str, bytes, str]] = {
    "UTF-16": ("r.csv", TABLE.encode("utf-16"), "it is in UTF-16); expected a CSV file in UTF-8; convert it with"),
    "UTF-16 without a mark": ("r.jsonl", LINE.encode("utf-16-le"), "it is in UTF-16LE"),
    "UTF-32": ("r.json", LINE.encode("utf-32"), "it is in UTF-32"),
    "cp1252 table": ("r.csv", TABLE.encode("cp1252"), "expected a CSV file in UTF-8; convert one that was"),
    "cp1252 lines": ("r.jsonl", LINE.encode("cp1252"), "iconv -f WINDOWS-1252 -t UTF-8"),
    "cp1252 array": ("r.json", f"[{LINE}]".encode("cp1252"), "iconv -f WINDOWS-1252 -t UTF-8"),
    "gzip": ("r.jsonl", gzip.compress(LINE.encode()), "is compressed; unpack it, for example with: gunzip --keep"),
    "xz": ("r.csv", lzma.compress(LINE.encode()), "with: unxz --keep"),
    "workbook": ("r.xlsx", WORKBOOK, "is an Excel workbook; save it as CSV in UTF-8"),
    "renamed workbook": ("r.csv", WORKBOOK, "is an Excel workbook"),
    "zip": ("r.jsonl", zipped("r.jsonl"), "is a zip archive; unpack it with: unzip"),
    "tar": ("r.jsonl", tarred(), "is a tar archive"),
    "pretty-printed record": ("r.json", json.dumps(ROW, indent=1).encode(), "go over several lines; write one object"),
    "pretty-printed records": ("r.jsonl", 2 * json.dumps(ROW, indent=1).encode(), "with: jq -c . "),
    "records in an object": ("r.json", json.dumps({"v": 1, "data": [ROW]}, indent=1).encode(), "jq -c '.data[]'"),
    "table with another name": ("r.jsonl", TABLE.encode(), "give its name the suffix .csv or .tsv"),
    "no parquet": ("r.parquet", TABLE.encode(), "is not a parquet file, in spite of its name; it begins with"),
    "LibreOffice workbook": ("r.csv", zipped("opendocument.spreadsheet"), "a LibreOffice workbook; save it"),
    "empty zip": ("r.json", zipped(), "is an empty zip archive"),
    "image": ("r.jsonl", b"\xff\xd8\xff\xe0", "is a JPEG image; name a file of records"),
    "database": ("r.jsonl", b"SQLite format 3\0" + bytes(99), "is an SQLite database; write its rows as"),
    "commas after lines": ("r.jsonl", 2 * LINE.replace("}", "},").encode(), "lines end with commas; write one"),
    "pointer": ("r.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "page": ("r.jsonl", b"<!DOCTYPE html>\n<html>", "is an HTML page; download the file itself"),
    "empty": ("r.jsonl", b"", "has no r"),
    "blank": ("r.csv", b"\n\n", "has no r"),
}  # fmt: skip
READ: dict[str, tuple[str, bytes]] = {
    "semicolons": ("r.csv", TABLE.replace(",", ";").encode()),
    "tabs": ("r.csv", TABLE.replace(",", "\t").encode()),
    "commas": ("r.tsv", TABLE.encode()),
    "a line for Excel": ("r.csv", f"sep=;\r\n{TABLE}".replace(",", ";").encode()),
    "a comma within semicolons": (
        "r.csv",
        b"image;question;answer;a, b\na.png;O\xc3\xb9 est-ce?;\xc3\xa0 gauche;x, y\n",
    ),
    "mark of bytes": ("r.csv", TABLE.encode("utf-8-sig")),
    "mark and semicolons": ("r.csv", TABLE.replace(",", ";").encode("utf-8-sig")),
    "mark of lines": ("r.jsonl", LINE.encode("utf-8-sig")),
    "mark of an array": ("r.json", f"[{LINE}]".encode("utf-8-sig")),
    "pretty-printed array": ("r.json", json.dumps([ROW], indent=2).encode()),
    "line ends of Windows": ("r.csv", TABLE.replace("\n", "\r\n").encode()),
    "JSON with the name of a table": ("r.csv", LINE.encode()),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 40)).save("a.png")
    Path("my.yaml").write_text("name: my\n")
    return lambda *words: CliRunner().invoke(main, words)


@pytest.mark.parametrize(("name", "content", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_another_file_is_named_with_what_to_do(run, name, content, says):
    Path(name).write_bytes(content)
    for words in (
        ("data", "convert", name, "o.jsonl"),
        ("data", "clean", name, "o.jsonl"),
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
    "an id in capitals": ("IMG_ID,question,answer", "rename `IMG_ID` to `img_id`"),
    "spaces": ("image, question, answer", "rename ` question` to `question`, ` answer` to `answer`"),
    "another separator of words": ("Image Path,question,answer", "rename `Image Path` to `image_path`"),
    "none": ("a.png,What?,yes", "no column is called `question`, got ['a.png', 'What?', 'yes']; the first line of a"),
    "no names": ("image,question,answer,,", "columns 4, 5 have no names; name them in the first line, or delete them"),
    "a name twice": ("image,question,answer,answer", "two columns are called 'answer'; expected different names"),
    "an open quote": ('image,question,"answer', "a cell begins with a quote and no quote ends it"),
    "a quote in a quote": ('image,question,"ans"wer"', "write a quote within a cell twice"),
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
        ("data", "clean", "rows", "o.jsonl"),
        ("data", "audit", "rows"),
        ("data", "tar", "rows", "tars"),
        ("check", "run.yaml", "--json"),
        ("init", "r.yaml", "--model", "none/none", "--train", "rows", "--yes"),
    ):
        result = run(*words)
        assert result.exit_code in (1, 2) and "it is a folder; name a file in it: train.jsonl" in result.output
