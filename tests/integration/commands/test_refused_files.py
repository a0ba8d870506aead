"""Files and folders that may not be read or written are named by every command."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support.rows import run, write_lines

from lookonce.run.folder import RunFolder

SUFFIXES = (".jsonl", ".parquet")
RUN = "PLACE/run.yaml"

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def place(sample, built, make_run, tmp_path) -> Path:
    """A folder with copies of the sample and its cache, a run file, and a run folder."""
    shutil.copytree(sample, tmp_path / "sample", ignore=shutil.ignore_patterns("images"))
    (tmp_path / "sample" / "images").symlink_to(sample / "images")
    shutil.copytree(built.folder, tmp_path / "caches" / built.folder.name, ignore=shutil.ignore_patterns("user-*"))
    names = {split: str(tmp_path / "sample" / f"{split}.jsonl") for split in ("train", "val", "test")}
    data = names | {"image_root": str(sample)}
    made = make_run(model={"path": str(tmp_path / "sample" / "model")}, data=data)
    (tmp_path / "run.yaml").write_text(made.to_yaml())
    RunFolder(made.output).claim(made, {})
    return tmp_path


def said_by(place: Path, words: str) -> str:
    """What a failing command says, after "Error: "."""
    result = run(*(word.replace("PLACE", str(place)) for word in words.split()))
    assert result.exit_code in (1, 2), result.output
    return result.stderr.rpartition("Error: ")[2].strip()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(("sample/model/config.json", f"{command} {RUN}") for command in ("cache build", "status")),
        ("sample/model/preprocessor_config.json", f"cache build {RUN}"),
        ("sample/model/tokenizer_config.json", f"train {RUN} --restart"),
        ("sample/model/model.safetensors", f"cache build {RUN}"),
        ("sample/train.jsonl", f"train {RUN}"),
        ("sample/train.jsonl", "data audit PLACE/sample/train.jsonl"),
        ("run.yaml", f"train {RUN}"),
        ("run/run.json", "eval PLACE/run"),
    ],
)
def test_a_file_that_may_not_be_read_is_named_with_the_command_that_shows_why(place, with_mode, name, words):
    path = place / name
    with_mode(path, 0o000)
    said = said_by(place, words)
    assert f"cannot open {path}: Permission denied; who may is shown by: namei -l {path}" in said, said
    assert "Errno" not in said


@pytest.mark.parametrize(
    ("name", "words", "file"),
    [
        ("caches", f"cache build {RUN} --set cache.dtype=bfloat16", "caches/"),
        (".", "sample PLACE/new", "new:"),
        (".", "data convert PLACE/sample/test.jsonl PLACE/out.json --to llava", "out.json:"),
    ],
)
def test_a_folder_that_may_not_be_written_to_is_named_with_the_command_that_shows_why(
    place, with_mode, name, words, file
):
    with_mode(place / name, 0o500)
    said = said_by(place, words)
    assert said.startswith(f"cannot open {place}/{file}") and "namei -l " in said, said
    assert ".tmp-" not in said and "Errno" not in said


@pytest.mark.guarantee(
    "An error about a full disk names the file, what it needs and what is free, and leaves no partial file."
)
@pytest.mark.parametrize(
    ("words", "file"),
    [
        *((f"data convert PLACE/sample/test.jsonl PLACE/new/out{suffix}", f"out{suffix}") for suffix in SUFFIXES),
        ("data audit PLACE/sample/test.jsonl --html PLACE/new/out.html", "out.html"),
        ("data prepare PLACE/mine.yaml PLACE/new/out --source PLACE/raw", "out/images/frame-0026.jpg"),
        ("sample PLACE/new/out", "out"),
        ("init PLACE/new/run.yaml --model PLACE/sample/model --train PLACE/sample/test.jsonl --yes", "run.yaml"),
        (f"cache plan {RUN} --set cache.dir=PLACE/new", ""),
        ("study jobs PLACE/study.yaml", "run-files/a-1.yaml"),
        (f"train {RUN} --set output=PLACE/new/run", "run/run.json"),
    ],
)
def test_a_full_disk_is_named_with_the_file_and_what_it_needs(place, largest_file, words, file):
    (place / "new").mkdir()
    (place / "raw").mkdir()
    (place / "raw" / "frame-0026.jpg").symlink_to(place / "sample" / "images" / "frame-0026.jpg")
    write_lines(place / "raw/test.jsonl", {"image": "frame-0026.jpg", "question": "Is there text?", "answer": "no"})
    (place / "mine.yaml").write_text("name: mine\nfiles: test.jsonl\n")
    (place / "study.yaml").write_text(f"base: {place}/run.yaml\noutput: {place}/new\nseeds: 1\nvariants: {{a: }}\n")
    with largest_file(64):
        said = said_by(place, words)
    assert said.startswith(f"no room for {place}/new/{file}".rstrip("/")), said
    assert "are free in" in said and said.endswith("and run the same command again"), said
    assert ("are needed" in said) == bool(file) and not re.search("Errno|os error|unexpected|.tmp-", said), said
    assert not [path for path in (place / "new").rglob("*") if path.is_file() and path.stat().st_size > 64]


def test_a_cache_that_may_not_be_entered_is_not_called_broken(place, with_mode):
    with_mode(place / "caches", 0o000)
    said = said_by(place, f"cache verify {RUN}")
    assert re.match(f"cannot open {place}/caches.*: Permission denied", said), said


def test_a_check_goes_on_after_a_file_that_may_not_be_read(place, with_mode):
    with_mode(place / "sample/model/tokenizer.json", 0o000)
    result = run("check", place / "run.yaml")
    said = "".join(result.stdout.split())
    assert "Permissiondenied" in said and "GPUmemory" in said, result.output
