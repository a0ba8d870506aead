"""Preparing and auditing: killed again and again, from the Hub, and 8,786 real rows with what counting finds."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.rows import files_in, jpeg_of, write_lines

from lookonce.datasets.audit.audit import audit, to_text
from lookonce.datasets.audit.findings import Corpus
from lookonce.datasets.prepare.definition import HubSection, find_definition
from lookonce.datasets.prepare.run import Options, prepare
from lookonce.datasets.prepare.sources import download_source
from lookonce.errors import SourceError, UsageError

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


NAME = "SimulaMet-HOST/Kvasir-VQA"
FIRST, SECOND = "1" * 39 + "a", "2" * 39 + "b"
KVASIR, SECTION = find_definition("kvasir-vqa"), HubSection(id=NAME, files=["data/*", "images/*"])
ROW = {"image_id": "a", "question": "Is there text?", "answer": "yes"}
FILES = {
    "README.md": b"---\nlicense: cc-by-nc-4.0\n---\nabout it",
    "data/raw.jsonl": json.dumps(ROW).encode() + b"\n",
    "images/a.jpg": b"\xff\xd8\xffpixels",
    "notes.bin": b"not wanted",
}


@pytest.fixture
def local(make_hub: Callable[..., Any]) -> Any:
    return make_hub(NAME, "datasets", FILES, ["license:cc-by-nc-4.0"])


def test_matching_files_are_downloaded_at_the_commit_of_main(local, capfd):
    source = download_source(SECTION, KVASIR)
    assert (source.location, source.revision, source.licence) == (NAME, SECOND, "cc-by-nc-4.0")
    assert [*source.files] == ["data/raw.jsonl"] and source.format == "json"
    assert (source.root / "images" / "a.jpg").read_bytes() == FILES["images/a.jpg"]
    assert not (source.root / "notes.bin").exists() and capfd.readouterr() == ("", "")
    assert all(f"/resolve/{SECOND}/" in path for path in local.asked if "resolve" in path)


@pytest.mark.parametrize("where", ["command line", "definition"])
def test_a_revision_pins_the_commit(local, where):
    pinned = SECTION.model_copy(update={"revision": FIRST if where == "definition" else None})
    source = download_source(pinned, KVASIR, FIRST if where == "command line" else None)
    assert source.revision == FIRST
    assert all(f"/resolve/{FIRST}/" in path for path in local.asked if "resolve" in path)


def test_a_downloaded_commit_needs_no_hub(local):
    download_source(SECTION, KVASIR, FIRST)
    local.refuses = (503, "")
    again = download_source(SECTION, KVASIR, FIRST)
    assert [*again.files] == ["data/raw.jsonl"] and again.revision == FIRST
    with pytest.raises(SourceError, match=r"cannot download .*/Kvasir-VQA from the Hub: .*(?s:.)*--source DIR"):
        download_source(SECTION, KVASIR)


def test_an_unknown_dataset_is_refused_with_its_name(local):
    with pytest.raises(SourceError, match="cannot download no/such at revision main from the Hub"):
        download_source(HubSection(id="no/such"), KVASIR, "main")


def test_prepare_reports_the_commit_and_the_licence(local, tmp_path):
    notes: list[str] = []
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"name: mine\nlicence: CC BY-NC 4.0\nhub: {{id: {NAME}, files: [data/*, images/*]}}")
    report = prepare(str(mine), tmp_path / "out", Options(), notes.append).report
    assert (
        f"{NAME} at commit {SECOND}, licence on the Hub: cc-by-nc-4.0; to get the same again: --revision {SECOND}"
        in notes
    )
    assert "CC BY-NC 4.0" in notes[0]
    assert (report["source"]["revision"], report["source"]["licence"]) == (SECOND, "cc-by-nc-4.0")


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--revision is for a dataset on the Hub"):
        prepare("kvasir-vqa", tmp_path / "out", Options(source=str(tmp_path), revision=FIRST))


def test_real_rows_have_the_findings_that_counting_gives(real_rows):
    result = audit(Corpus.read([real_rows]))
    counts = {finding.code: finding.count for finding in result.findings}
    assert len(counts) == len(result.findings)
    rows = [json.loads(line) for line in real_rows.read_text().splitlines()]
    asked_twice: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        asked_twice.setdefault((row["image_filename"], row["question"]), []).append(row["answer"])
    repeated = [answers for answers in asked_twice.values() if len(answers) > 1]
    differing = sum(len({frozenset(re.split("; ?", answer)) for answer in answers}) > 1 for answers in repeated)
    assert differing and counts["contradictions"] == differing
    assert counts["duplicates"] == len(repeated) - differing
    assert counts["missing-values"] == sum(row["question"] == "none" for row in rows) > 0
    assert counts["images-missing"] == len({row["image_filename"] for row in rows})
    assert result.num_distinct_questions == len({row["question"] for row in rows})
    per_image = Counter(Counter(row["image_filename"] for row in rows).values())
    assert result.questions_per_image == dict(sorted(per_image.items()))
    assert to_text(result).count("cannot read image") == 1
