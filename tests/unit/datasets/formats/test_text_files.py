"""Records in JSON arrays and CSV files: what is read, and where a bad file is wrong."""

from __future__ import annotations

import csv
import json

import pytest
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.datasets.records import Turn, read_records
from lookonce.errors import RecordsError

GOOD = json.dumps({"image_filename": "a.jpg", "question": "Q", "answer": "A"})


def test_an_array_is_read_like_jsonl_with_the_number_of_each_record(tmp_path):
    path = tmp_path / "train.json"
    path.write_text(f"\ufeff\n [{json.dumps(json.loads(GOOD), indent=1)},\n\n{GOOD}\n]\n", "utf-8")
    records = read_records(path)
    assert [record.turns[0].question for record in records] == ["Q", "Q"]
    assert [record.origin for record in records] == [f"{path}: record 1", f"{path}: record 2"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[]", "train.json has no records; expected one JSON object per line, an array of them, CSV"),
        ("[1]", "train.json: record 1: expected a JSON object, got 1"),
        (f'[{GOOD}, {{"turns": 1}},', "train.json: record 2: `turns` must be a list"),
        ("[\n{} {}]", "train.json: record 1: "),
        (f"[\n{GOOD},\n{{", "train.json: record 2: not JSON (Expecting property name"),
        (f"[\n{GOOD},\n{{", "at line 3, column 2)"),
        ("[{}", "train.json: record 1: "),
        ("[" * 100_000, "train.json: record 1: not JSON that can be read"),
    ],
)
def test_a_bad_array_is_refused_with_file_and_number(tmp_path, content, expected):
    path = tmp_path / "train.json"
    path.write_text(content)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert expected in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"[{GOOD}", "train.json: expected a comma or ] after record 1; is the file cut off?"),
        (f"[{GOOD} {GOOD}]", "expected a comma or ] after record 1"),
        (f"[{GOOD},]", "train.json: record 2: not JSON (Expecting value"),
        (f"[{GOOD}]\n[{GOOD}]", "train.json: text after the end of the array"),
    ],
)
def test_an_array_with_a_bad_end_is_refused(tmp_path, content, expected):
    path = tmp_path / "train.json"
    path.write_text(content)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert expected in str(refusal.value)


def test_csv_has_one_record_per_row_and_an_empty_cell_is_a_missing_key(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text('\ufeffimage,question,answer,source\r\na.jpg,"Is it, ""so""\nor not?",yes,\r\n\r\nb.jpg,Q,A,x\r\n')
    first, second = read_records(path)
    assert first.turns == (Turn('Is it, "so"\nor not?', "yes"),)
    assert (first.metadata, second.metadata) == ({}, {"source": "x"})
    assert (first.origin, second.origin) == (f"{path}:2", f"{path}:5")
    path.rename(tmp_path / "train.tsv").write_text("image\tquestion\tanswer\na.jpg\tQ, q\tA\n")
    assert read_records(tmp_path / "train.tsv")[0].turns == (Turn("Q, q", "A"),)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "image,question,answer\na.jpg,Is it, so?,yes\n",
            "train.csv:2: expected 3 cells as in the header, got 4; are commas quoted?",
        ),
        ("image,question,question\n", "train.csv:1: two columns are called 'question'"),
        ('image,question,answer\na.jpg,"Q"q,A\n', "train.csv:2: not CSV"),
        ("image,question,answer\na.jpg,,A\n", "train.csv:2: expected"),
        ("image,question,answer\n", "train.csv has no records"),
        ("", "train.csv has no records"),
    ],
)
def test_bad_csv_is_refused_with_file_and_line(tmp_path, content, expected):
    path = tmp_path / "train.csv"
    path.write_text(content)
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert expected in str(refusal.value)


FORMULAS = [
    "=1+1",
    "@SUM(A1)",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "\t=1",
    "\r=1",
    "\n=1",
    " =1",
    "'=1",
    "''@x",
    "=",
    "-",
    "- none",
]
PLAIN = ["-5", "+1.5e-3", "-.5", "a=b", "'quoted'", "5 - 3", "o'clock", "\u2212 5"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_cell_is_never_a_formula_and_reads_back_as_the_same_text(tmp_path, suffix):
    """Through the commands: converted to a table and back, the records are the same; numbers stay numbers."""
    values = FORMULAS + PLAIN
    rows = [
        {"image_filename": "a.jpg", "question": f"{value}?", "answer": value or "x", "=key": value, "number": -5}
        for value in values
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source, target in (("rows.jsonl", f"table{suffix}"), (f"table{suffix}", "again.jsonl")):
        done = CliRunner().invoke(
            main, ["data", "convert", str(tmp_path / source), str(tmp_path / target), "--to", "flat"]
        )
        assert done.exit_code == 0, done.output
    with (tmp_path / f"table{suffix}").open(newline="") as file:
        header, *cells = csv.reader(file, delimiter="\t" if suffix == ".tsv" else ",")
    answers = [row[header.index("answer")] for row in cells]
    assert answers == [f"'{value}" for value in FORMULAS] + PLAIN
    assert "'=key" in header and {row[header.index("number")] for row in cells} == {"-5"}
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    assert [(row["question"], row["answer"], row["=key"]) for row in again] == [
        (row["question"], row["answer"], row["=key"]) for row in rows
    ]


def test_a_table_of_very_many_columns_is_read_at_once(tmp_path):
    names = ["image_filename", "question", "answer", *(f"column{number}" for number in range(50_000))]
    path = tmp_path / "wide.csv"
    path.write_text(f"{','.join(names)}\n{','.join(['x'] * len(names))}\n")
    assert len(read_records(path)[0].metadata) == 50_000
