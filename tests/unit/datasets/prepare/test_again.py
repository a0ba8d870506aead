"""A preparation that was interrupted and runs again has the same bytes, and other settings are never mixed in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.rows import files_in, write_lines

from lookonce.claim_file import FolderClaim
from lookonce.datasets.prepare import run
from lookonce.datasets.prepare.run import WORK, Options, prepare
from lookonce.errors import UsageError
from lookonce.files import read_object, write_json


class PowerCut(BaseException):
    pass


def finished(folder: Path) -> dict[str, bytes]:
    assert not (folder / WORK).exists() and not list(folder.rglob("*.tmp-*"))
    return files_in(folder)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory) -> dict[str, bytes]:
    """What a run makes that is not interrupted."""
    return finished(prepare("kvasir-vqa", tmp_path_factory.mktemp("whole") / "out", Options(str(source))).folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def begun(made, out, monkeypatch):
    """Begins a run that is interrupted at a step after reading."""

    def begun(step: str = "build_records") -> None:
        def cut(*arguments: object) -> None:
            raise PowerCut

        with monkeypatch.context() as patched:
            patched.setattr(run, step, cut)
            with pytest.raises(PowerCut):
                made()
        assert not (out / "report.json").exists()

    return begun


@pytest.mark.parametrize("step", ["write_parts", "write_json", "build_records"])
def test_a_run_interrupted_after_reading_ends_with_the_same_bytes(out, made, begun, expected, step):
    begun(step)
    made()
    assert finished(out) == expected


def test_a_run_killed_after_the_report_is_complete(out, made, expected):
    made()
    (out / WORK).mkdir()
    (out / WORK / "claim.json").write_text("")
    assert not made().is_new and finished(out) == expected


def test_what_an_unfinished_run_has_left_is_removed(out, made, begun, expected):
    begun()
    (out / "images" / "cl7.jpg").write_bytes(b"half")
    names = ("images/cl7.jpg.tmp-host-1-0", "val.jsonl.tmp-host-1-0", "report.json.tmp-host-1-0", "train.jsonl")
    for name in (*names, "images/of-before.jpg"):
        (out / name).write_bytes(b"left over")
    made()
    assert finished(out) == expected


def test_a_complete_dataset_is_not_changed(out, made):
    before = made()
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = made()
    assert before.is_new and not again.is_new and again.report == before.report
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_other_settings_in_a_prepared_folder_are_refused_with_the_differences(made):
    made()
    for options, difference in (
        ({"seed": 7}, "definition.split.seed: 42 there, 7 now"),
        ({"duplicates": "drop"}, "definition.duplicates: 'merge' there, 'drop' now"),
        ({"split": "official"}, "definition.split.by: 'image' there, 'official' now"),
    ):
        with pytest.raises(UsageError) as refusal:
            made(**options)
        assert difference in str(refusal.value) and "Choose another folder" in str(refusal.value)


@pytest.mark.parametrize("options", [{"seed": 7}, {"duplicates": "drop"}])
def test_what_was_begun_with_other_settings_is_replaced(out, made, begun, options):
    begun()
    (out / "images" / "of-before.jpg").write_bytes(b"of an image that is left out now")
    assert made(**options).is_new
    assert finished(out) == finished(made("other", **options).folder)


def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path, made):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty and holds no prepared dataset"):
        made()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is not empty"):
        made("file")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine.txt"]


def test_a_second_process_in_the_same_folder_is_refused(tmp_path, made):
    with FolderClaim(tmp_path / "out" / WORK / "claim.json", "lookonce data prepare") as claim:
        assert not claim.take()
        with pytest.raises(UsageError, match="is in use by `lookonce data prepare`"):
            made()
    assert made().is_new


def test_a_folder_that_another_process_completed_meanwhile_is_not_prepared_again(tmp_path, made, monkeypatch):
    first, take = [], FolderClaim.take

    def slow(claim):
        if not first:
            first.append(None)
            first[0] = made()
        return take(claim)

    monkeypatch.setattr(FolderClaim, "take", slow)
    assert not made().is_new and first[0].is_new


@pytest.fixture
def source_of_files(tmp_path):
    """A source of one row whose image lies in either of two folders."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jpg").write_bytes(b"\xff\xd8\xff" + name.encode())
    return write_lines(tmp_path / "in" / "rows.jsonl", {"image": "0.jpg", "question": "q", "answer": "yes"})


def test_another_content_is_another_source(tmp_path, out, source_of_files):
    (tmp_path / "own.yaml").write_text("name: own")
    own, options = str(tmp_path / "own.yaml"), Options(str(source_of_files), image_root=tmp_path / "one")
    assert prepare(own, out, options).is_new and not prepare(own, out, options).is_new
    assert not prepare(own, out, replace(options, image_root=tmp_path / "two")).is_new  # the images may have been moved
    source_of_files.write_text(source_of_files.read_text().replace("yes", "not"))
    with pytest.raises(UsageError, match=r"(?s)other settings, 1 difference:\n  content.rows.jsonl: '[0-9a-f]*'"):
        prepare(own, out, options)


def test_a_dataset_prepared_by_an_earlier_version_is_complete(tmp_path, out, source_of_files):
    (tmp_path / "own.yaml").write_text("name: own")
    own, options = str(tmp_path / "own.yaml"), Options(str(source_of_files), image_root=tmp_path / "one")
    prepare(own, out, options)
    report = read_object(out / "report.json")
    del report["settings"]["content"]
    write_json(out / "report.json", report)
    assert not prepare(own, out, options).is_new


def test_what_is_prepared_within_its_source_does_not_belong_to_it(tmp_path, source_of_files):
    (tmp_path / "own.yaml").write_text("name: own")
    own, options = str(tmp_path / "own.yaml"), Options(str(tmp_path / "in"), image_root=tmp_path / "one")
    assert prepare(own, tmp_path / "in" / "out", options).is_new
    assert not prepare(own, tmp_path / "in" / "out", options).is_new
