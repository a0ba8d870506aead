"""Preparing a set: nothing is lost, interrupted it goes on to the same bytes, and other settings are never mixed in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lookonce.cli import main
from lookonce.datasets.prepare import chunks as portions
from lookonce.datasets.prepare import images, parquet_files
from lookonce.datasets.prepare.journal import WORK, Journal
from lookonce.datasets.prepare.report import report_text
from lookonce.datasets.prepare.run import Options, Prepared, prepare
from lookonce.datasets.records import Record, read_records
from lookonce.errors import ImageError, SourceError, UsageError
from lookonce.run.config import RunFile

EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
QUESTIONS = ["Is there text?", "How many instrumnets are in the image?", "What type of polyp is present?", "none"]
ANSWERS = ["yes", "lower-rigth;center", "nan", "none", "", "paris ip", "paris is", ">20"]


def jpeg(name: object) -> bytes:
    return b"\xff\xd8\xff\xe0" + f"image {name} ".encode() * 40


def write_source(folder: Path, num_images: int = 12, num_files: int = 4) -> Path:
    """Parquet files of four questions about each image; two images have the same bytes."""
    folder.mkdir(parents=True)
    rows = []
    for number in range(num_images):
        image = {"bytes": jpeg(max(number, 1)), "path": None}
        for question, answer in [*zip(QUESTIONS, ANSWERS, strict=False), (QUESTIONS[2], "paris is")]:
            rows.append(
                {"image": image, "source": "s", "question": question, "answer": answer, "img_id": f"cl{number}"}
            )
    schema = pa.schema([(name, EMBEDDED if name == "image" else pa.string()) for name in rows[0]])
    each = len(rows) // num_files
    for number in range(num_files):
        table = pa.Table.from_pylist(rows[number * each : (number + 1) * each], schema=schema)
        parquet.write_table(table, folder / f"{number:05d}.parquet")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def records_of(folder: Path) -> dict[str, list[Record]]:
    return {path.stem: read_records(path) for path in sorted(folder.glob("*.jsonl"))}


def accounted(report: dict) -> bool:
    """All rows that were read are records, or left out for one reason."""
    rows = report["rows"]
    return rows["read"] + rows["of_variants"] == rows["records"] + sum(rows["left_out"].values())


@pytest.fixture
def real_rows() -> Path:
    """The real validation rows of Kvasir-VQA, with their dirt and without images."""
    folder = Path(os.environ.get("LOOKONCE_REAL_DATA", Path(__file__).parents[3] / "shared"))
    path = folder / "kvasir-vqa" / "val.jsonl"
    if not path.exists():
        pytest.skip(f"no kvasir-vqa/val.jsonl in {folder} (LOOKONCE_REAL_DATA names the folder of the real data)")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in")


@pytest.fixture
def made(tmp_path: Path, source: Path) -> Callable[..., Prepared]:
    return lambda name="out", **options: prepare("kvasir-vqa", tmp_path / name, Options(str(source), **options))


def test_a_prepared_set_is_records_images_and_a_report(tmp_path, made):
    report = made().report
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("images", "report.json", "test.jsonl", "train.jsonl", "val.jsonl")
    ]
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert report["rows"] == {
        "read": 60,
        "of_variants": 0,
        "records": 11 * 2 + 11,
        "left_out": {
            "no question or no answer": 24,
            "the same as another row": 3,
        },
    }
    assert {tally["name"]: tally["changed"] for tally in report["rules"]}["typos in questions"] == 12
    assert report["images"] == {"written": 11, "names": 12, "in_no_record": 0, "with_several_names": 1, "not_found": {}}
    assert accounted(report)
    written = records_of(tmp_path / "out")
    assert {part: len(records) for part, records in written.items()} == report["split"]["records"]
    assert all(record.images[0].is_file() for records in written.values() for record in records)


def test_byte_identical_images_of_two_names_are_one_file_and_on_one_side(tmp_path, made):
    made()
    sides: dict[bytes, set[str]] = {}
    for part, records in records_of(tmp_path / "out").items():
        for record in records:
            sides.setdefault(record.images[0].read_bytes(), set()).add(part)
    assert len(sides) == 11 and all(len(found) == 1 for found in sides.values())
    assert not (tmp_path / "out" / "images" / "cl1.jpg").exists()


@pytest.mark.parametrize("policy", ["merge", "keep", "drop"])
def test_duplicates_are_treated_as_the_command_line_says(tmp_path, made, policy):
    report = made(duplicates=policy).report
    assert report["duplicates"]["policy"] == policy and accounted(report)


def test_two_images_of_one_name_are_two_files_whatever_the_name(tmp_path):
    (tmp_path / "in").mkdir()
    names = ["a", "a", "A", "../a", "b.jpg", "é/ü", "." * 9, "x" * 300]
    rows = [
        {"image": jpeg(number), "question": f"q{number}", "answer": "x", "img_id": name}
        for number, name in enumerate(names)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / "a.parquet")
    prepare("kvasir-vqa", tmp_path / "out", Options(str(tmp_path / "in")))
    found = {
        record.turns[0].question: record.images[0]
        for records in records_of(tmp_path / "out").values()
        for record in records
    }
    assert {question: path.read_bytes() for question, path in found.items()} == {
        f"q{number}": jpeg(number) for number in range(len(names))
    }
    assert {path.parent for path in found.values()} == {tmp_path / "out" / "images"}
    assert len({path.name.lower() for path in found.values()}) == len(names)
    assert found["q0"].name == "a.jpg" and found["q4"].name == "b.jpg"


ROW = st.fixed_dictionaries(
    {
        "question": st.sampled_from(QUESTIONS),
        "answer": st.sampled_from(ANSWERS),
        "img_id": st.sampled_from(list("abcd")),
    }
)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=25),
    policy=st.sampled_from(["merge", "keep", "drop"]),
    split=st.sampled_from(["image", "official"]),
)
def test_every_row_is_in_a_record_or_counted(tmp_path_factory, rows, policy, split):
    folder = tmp_path_factory.mktemp("rows")
    (folder / "in" / "images").mkdir(parents=True)
    for name in "abc":  # d is missing
        (folder / "in" / "images" / f"{name}.jpg").write_bytes(jpeg("c" if name == "b" else name))
    for part in ("train", "test", "raw"):
        mine = [row for row in rows if {"a": "train", "d": "raw"}.get(row["img_id"], "test") == part]
        (folder / "in" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mine))
    try:
        report = prepare(
            "kvasir-vqa", folder / "out", Options(str(folder / "in"), split=split, duplicates=policy)
        ).report
    except (ImageError, SourceError):
        assert all("none" in row["question"] or row["answer"] in ("", "nan") or row["img_id"] == "d" for row in rows)
        return
    assert report["rows"]["read"] == len(rows) and accounted(report)
    assert sum(map(len, records_of(folder / "out").values())) == report["rows"]["records"]


# Real rows.


def as_said(row: dict) -> tuple[str, str, tuple[str, ...]]:
    """Image, question, and the labels of the answer whatever their order and their spelling."""
    labels = [label.strip().replace("rigth", "right") for label in row["answer"].split(";")]
    return row["image_id"], row["question"], tuple(sorted(label.replace(">20mm", ">20") for label in labels))


def test_the_dirt_of_the_real_rows_is_found_and_counted(tmp_path, real_rows):
    rows = [json.loads(line) for line in real_rows.read_text().splitlines()]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "val.jsonl").symlink_to(real_rows)
    for name in {row["image_id"] for row in rows}:
        (tmp_path / "in" / f"{name}.jpg").write_bytes(jpeg(name))
    report = prepare("kvasir-vqa", tmp_path / "out", Options(str(tmp_path / "in"))).report
    assert (report["rows"]["read"], report["images"]["written"]) == (8786, 975) and accounted(report)
    did = {tally["name"]: tally["changed"] + tally["dropped"] for tally in report["rules"]}
    pairs = Counter((row["image_id"], row["question"]) for row in rows)
    several = Counter((image, question) for image, question, _ in {as_said(row) for row in rows})
    assert did == {
        "no question or no answer": sum(row["question"] == "none" for row in rows),
        "typos in questions": sum("instrumnets" in row["question"] for row in rows),
        "typos in answers": sum("rigth" in row["answer"] for row in rows),
        "one kind of separator": sum(";" in row["answer"].replace("; ", "") for row in rows),
        "sizes with their unit": sum(">20" in row["answer"].replace("; ", ";").split(";") for row in rows),
        "labels in one order": did["labels in one order"],
        "empty question or answer": 0,
    }
    assert did["typos in questions"] == 539 and did["labels in one order"] > 100
    assert report["duplicates"]["num_pairs"] == sum(number > 1 for number in pairs.values()) == 46
    assert report["duplicates"]["num_differing_pairs"] == sum(number > 1 for number in several.values()) > 20
    assert report["split"]["images"] == {"train": 683, "val": 146, "test": 146}  # also those of which none is asked
    assert report["images"]["in_no_record"] == 9
    assert report["questions_not_in_the_definition"] == 0


# Interruptions.


class PowerCut(BaseException):
    pass


def finished(folder: Path) -> dict[str, bytes]:
    assert not (folder / WORK).exists() and not list(folder.rglob("*.tmp-*"))
    return content(folder)


@pytest.mark.parametrize("cut_at", range(12))
def test_interrupted_anywhere_and_run_again_it_ends_with_the_same_bytes(tmp_path, made, monkeypatch, cut_at):
    monkeypatch.setattr(portions, "PORTION_ROWS", 5)
    expected = finished(made("uninterrupted").folder)
    writes, write = [], images._write

    def cut(path: Path, data: bytes) -> None:
        writes.append(path)
        if len(writes) == cut_at:
            raise PowerCut
        write(path, data)

    monkeypatch.setattr(images, "_write", cut)
    if 1 <= cut_at <= 11:
        with pytest.raises(PowerCut):
            made()
        assert not (tmp_path / "out" / "report.json").exists()
    num_before = len(writes)
    assert made().fresh
    assert finished(tmp_path / "out") == expected
    assert not num_before or len(writes) - num_before <= 11 - cut_at + 3  # what was done is not done again


@pytest.mark.parametrize("place", ["write_parts", "write_json", "compose"])
def test_interrupted_after_reading_nothing_is_read_again(tmp_path, made, monkeypatch, place):
    expected = finished(made("uninterrupted").folder)

    def cut(*arguments: object) -> None:
        raise PowerCut

    with monkeypatch.context() as patched:
        patched.setattr(f"lookonce.datasets.prepare.run.{place}", cut)
        with pytest.raises(PowerCut):
            made()
    monkeypatch.setattr(parquet_files, "_read_groups", cut)
    made()
    assert finished(tmp_path / "out") == expected


def test_killed_after_the_report_it_is_complete(tmp_path, made, monkeypatch):
    expected = finished(made("uninterrupted").folder)
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "clear", lambda journal: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made()
    assert not made().fresh and finished(tmp_path / "out") == expected


def test_an_image_that_was_removed_meanwhile_is_written_again(tmp_path, made, monkeypatch):
    expected = finished(made("uninterrupted").folder)
    with monkeypatch.context() as patched:
        patched.setattr("lookonce.datasets.prepare.run.compose", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made()
    (tmp_path / "out" / "images" / "cl5.jpg").unlink()
    (tmp_path / "out" / "images" / "cl7.jpg").write_bytes(b"half")
    for name in ("images/cl7.jpg.tmp-host-1-0", "val.jsonl.tmp-host-1-0"):
        (tmp_path / "out" / name).write_bytes(b"left over")
    made()
    assert finished(tmp_path / "out") == expected


def test_killed_many_times_it_ends_with_the_same_bytes(tmp_path, monkeypatch):
    source = write_source(tmp_path / "in", num_images=200, num_files=8)
    expected = content(prepare("kvasir-vqa", tmp_path / "uninterrupted", Options(str(source))).folder)
    code = (
        "import sys; from pathlib import Path; from lookonce.datasets.prepare import chunks as portions, images\n"
        "from lookonce.datasets.prepare.run import Options, prepare\n"
        "import time; portions.PORTION_ROWS = 50; write = images._write\n"
        "images._write = lambda path, data: (time.sleep(0.002), write(path, data))\n"
        "print('ready', flush=True)\n"
        "prepare('kvasir-vqa', Path(sys.argv[2]), Options(sys.argv[1]))"
    )
    kills = 0
    for attempt in range(40):
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(source), str(tmp_path / "out")], stdout=subprocess.PIPE
        )
        assert process.stdout and process.stdout.readline()
        time.sleep(0.1 + 0.3 * attempt)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        process.stdout.close()
        if (tmp_path / "out" / "report.json").exists() and not (tmp_path / "out" / WORK).exists():
            break
    assert kills > 0 and content(tmp_path / "out") == expected


def test_a_finished_set_is_left_alone(tmp_path, made):
    before = made()
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = made()
    assert before.fresh and not again.fresh and again.report == before.report
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}


@pytest.mark.parametrize("stage", ["finished", "begun"])
@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"seed": 7}, "definition.split.seed: 42 there, 7 now"),
        ({"duplicates": "drop"}, "definition.duplicates: 'merge' there, 'drop' now"),
        ({"split": "official"}, "definition.split.by: 'image' there, 'official' now"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused_with_the_difference(
    made, monkeypatch, stage, options, difference
):
    if stage == "begun":
        with monkeypatch.context() as patched:
            patched.setattr("lookonce.datasets.prepare.run.compose", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                made()
    else:
        made()
    with pytest.raises(UsageError) as refusal:
        made(**options)
    assert difference in str(refusal.value) and "Choose another folder" in str(refusal.value)


def test_a_source_that_has_changed_is_refused(made, source):
    made()
    (source / "00000.parquet").write_bytes((source / "00001.parquet").read_bytes() + b"x")
    with pytest.raises(UsageError, match=r"source.files.00000.parquet: \d+ there, \d+ now"):
        made()


def test_a_folder_with_something_else_is_left_alone(tmp_path, made):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no prepared set"):
        made()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        made("file")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine.txt"]


def test_two_at_once_in_one_folder_are_refused(tmp_path, made):
    with Journal(tmp_path / "out").held(), pytest.raises(UsageError, match="is being prepared by another process"):
        made()
    assert made().fresh


# Splits that others have drawn.


def test_lists_of_images_are_followed_and_the_rest_is_counted(tmp_path, made):
    lists = {"train": [f"cl{number}" for number in range(2, 8)], "test": ["cl8.jpg", "cl9"]}
    (tmp_path / "ids.json").write_text(json.dumps(lists))
    report = made(split=str(tmp_path / "ids.json")).report
    assert report["split"]["images"] == {"train": 6, "val": 0, "test": 2} and accounted(report)
    assert report["rows"]["left_out"]["in no part of the split"] == 4 * 3
    assert not (tmp_path / "out" / "val.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is neither `image` nor `official` nor a JSON file"),
        ('{"training": []}', 'must be like {"train"'),
        ('{"train": [1]}', 'must be like {"train"'),
        ('{"train": ["a"], "val": ["a"]}', "has image a in two parts"),
        ('{"train": ["a"]}', "no image of kvasir-vqa is in the lists of --split; they are called cl0, cl1, cl10"),
    ],
)
def test_lists_with_mistakes_are_refused(tmp_path, made, text, message):
    (tmp_path / "ids.json").write_text(text)
    with pytest.raises(UsageError) as refusal:
        made(split=str(tmp_path / "ids.json"))
    assert message in str(refusal.value)


def test_an_own_split_that_the_set_does_not_have_is_refused(made):
    with pytest.raises(UsageError, match="--split image draws one"):
        made(split="official")


def test_variants_that_the_set_does_not_have_are_refused(made):
    with pytest.raises(UsageError, match="kvasir-vqa has no transformed variants"):
        made(num_variants=1)


def test_rules_that_leave_nothing_are_an_error(tmp_path, source):
    (tmp_path / "mine.yaml").write_text("name: mine\nrules: [{name: all, rule: keep_rows, metadata: x, values: [y]}]")
    with pytest.raises(SourceError, match="the rules of mine have left out all 60 rows"):
        prepare(str(tmp_path / "mine.yaml"), tmp_path / "out", Options(str(source)))


# Cost.


def test_a_repeated_image_is_hashed_and_written_once(tmp_path, made, monkeypatch):
    hashed, written = [], []
    key, write = images.bytes_key, images._write
    monkeypatch.setattr(images, "bytes_key", lambda data: (hashed.append(data), key(data))[1])
    monkeypatch.setattr(images, "_write", lambda path, data: (written.append(path), write(path, data))[1])
    made()
    assert len(hashed) <= 12 + 4 and len(written) == 11  # a file's first image may be its neighbour's last


def test_memory_does_not_grow_with_the_images(tmp_path):
    (tmp_path / "in").mkdir()
    schema = pa.schema(
        [("image", EMBEDDED), ("question", pa.string()), ("answer", pa.string()), ("img_id", pa.string())]
    )
    with parquet.ParquetWriter(tmp_path / "in" / "a.parquet", schema, compression="none") as writer:
        for number in range(60):
            image = {"bytes": os.urandom(1_000_000), "path": None}
            rows = [{"image": image, "question": str(q), "answer": "a", "img_id": str(number)} for q in range(2)]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    before = pa.total_allocated_bytes()
    peaks = []
    add = images.ImageStore.add

    def watch(self, data, stem):
        peaks.append(pa.total_allocated_bytes() - before)
        return add(self, data, stem)

    images.ImageStore.add = watch  # type: ignore[method-assign]
    try:
        prepare("kvasir-vqa", tmp_path / "out", Options(str(tmp_path / "in")))
    finally:
        images.ImageStore.add = add  # type: ignore[method-assign]
    assert len(peaks) == 120 and max(peaks) < 40_000_000


# The command.


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["data", "prepare", *map(str, words)])


def test_the_command_prints_licence_table_and_what_is_next(tmp_path, source):
    result = run("kvasir-vqa", tmp_path / "out", "--source", source)
    assert result.exit_code == 0, result.stderr
    assert "CC BY-NC 4.0" in result.stdout and "typos in questions" in result.stdout
    assert f"lookonce data audit {tmp_path / 'out'}/*.jsonl" in result.stderr
    section = result.stderr.partition("data:\n")[2]
    data = yaml.safe_load("data:\n" + section)["data"]
    RunFile.model_validate({"model": {"path": "m"}, "data": data, "output": "o"})
    assert all(read_records(Path(path)) for path in data.values())
    again = run("kvasir-vqa", tmp_path / "out", "--source", source)
    assert again.stdout == result.stdout and "is prepared already" in again.stderr


def test_the_command_prints_the_report_as_json_alone(tmp_path, source):
    result = run("kvasir-vqa", tmp_path / "out", "--source", source, "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report_text(json.loads(result.stdout)).startswith("Kvasir-VQA\n")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("kvasir", "OUT"), 2, "no set is called 'kvasir'"),
        (("endovis18-vqa", "OUT"), 1, "is not on the Hub"),
        (("kvasir-vqa", "OUT", "--source", "nowhere"), 1, "there is nothing at nowhere"),
        (("kvasir-vqa", "OUT", "--source", "SOURCE", "--format", "csv"), 1, "holds no csv files with questions"),
        (("kvasir-vqa", "OUT", "--source", "SOURCE", "--variants", "2"), 2, "has no transformed variants"),
        (("kvasir-vqa", "SOURCE", "--source", "SOURCE"), 2, "is not empty and holds no prepared set"),
        (("kvasir-vqa",), 2, "Missing argument"),
    ],
)
def test_mistakes_give_a_message_and_an_exit_code_without_a_traceback(tmp_path, source, words, code, message):
    places = {"OUT": tmp_path / "out", "SOURCE": source}
    result = run(*(places.get(word, word) for word in words))
    assert result.exit_code == code and message in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr and not (tmp_path / "out").exists()
