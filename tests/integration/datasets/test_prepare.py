"""Preparing a dataset: killed again and again it ends with the same bytes, and it finds the mistakes of real rows."""

from __future__ import annotations

import json
import signal
from collections import Counter

from support.rows import files_in, jpeg_of, write_lines

from lookonce.datasets.prepare.run import Options, prepare

KILLED = """
import os, signal, sys, time
from pathlib import Path
import pyarrow.parquet
from lookonce.datasets.prepare import sources
from lookonce.datasets.prepare.run import Options, prepare
write = sources._write
sources._write = lambda path, data: (time.sleep(0.05), write(path, data))
for attempt in range(1, 100):
    if not (child := os.fork()):
        signal.setitimer(signal.ITIMER_REAL, 0.05 * 1.5**attempt)  # SIGALRM ends it at once, as SIGKILL does
        prepare("kvasir-vqa", Path("out"), Options(sys.argv[1]))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, flush=True)
    if code == 0:
        break
"""
"""A program that kills a preparation later and later, until it ends by itself."""


def test_a_run_killed_many_times_ends_with_the_same_bytes(tmp_path, preloaded):
    source, questions = tmp_path / "in", ("Is there text?", "How many instrumnets are in the image?")
    rows = [
        {"question": question, "answer": "lower-rigth;center", "img_id": f"cl{number}"}
        for number in range(30)
        for question in questions
    ]
    write_lines(source / "train.jsonl", *rows)
    (source / "images").mkdir()
    for number in range(30):
        (source / "images" / f"cl{number}.jpg").write_bytes(jpeg_of(number))
    expected = files_in(prepare("kvasir-vqa", tmp_path / "uninterrupted", Options(str(source))).folder)
    killer = preloaded.start(KILLED, str(source), folder=tmp_path, name="killer")
    assert killer.wait() == 0, killer.error
    *killed, last = killer.out.split()
    assert last == "0" and len(killed) > 1 and set(killed) == {str(-signal.SIGALRM)}, killer.error
    assert files_in(tmp_path / "out") == expected


def normalised(row: dict) -> tuple[str, str, tuple[str, ...]]:
    """Image, question, and the labels of the answer in any order and spelling."""
    labels = [label.strip().replace("rigth", "right") for label in row["answer"].split(";")]
    return row["image_id"], row["question"], tuple(sorted(label.replace(">20mm", ">20") for label in labels))


def test_rules_count_the_known_mistakes_of_the_real_rows(tmp_path, real_rows):
    rows = [json.loads(line) for line in real_rows.read_text().splitlines()]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "val.jsonl").symlink_to(real_rows)
    for name in {row["image_id"] for row in rows}:
        (tmp_path / "in" / f"{name}.jpg").write_bytes(jpeg_of(name))
    report = prepare("kvasir-vqa", tmp_path / "out", Options(str(tmp_path / "in"))).report
    assert (report["rows"]["read"], report["images"]["written"]) == (8786, 975)
    assert report["rows"]["records"] + sum(report["rows"]["left_out"].values()) == 8786
    did = {tally["name"]: tally["changed"] + tally["dropped"] for tally in report["rules"]}
    pairs = Counter((row["image_id"], row["question"]) for row in rows)
    several = Counter((image, question) for image, question, _ in {normalised(row) for row in rows})
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
    assert report["split"]["images"] == {"train": 683, "val": 146, "test": 146}  # also images without questions
    assert report["images"]["in_no_record"] == 9
    assert report["questions_not_in_the_definition"] == 0
