"""`lookonce init` writes a run file that passes `lookonce check`."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from click.testing import CliRunner, Result
from PIL import Image
from pyarrow import parquet

from lookonce.cli import main
from lookonce.run.config import read_run_file


@pytest.fixture
def init(sample, tmp_path, monkeypatch):
    """Runs the command on the sample, in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, given: bool = True, answers: str | None = None) -> Result:
        monkeypatch.setattr("lookonce.commands.prepare.is_terminal", lambda: answers is not None)
        own = ["--model", str(sample / "model"), "--train", str(sample / "train.jsonl")] if given else []
        return CliRunner().invoke(main, ["init", "run.yaml", *own, *words], input=answers)

    return run


def test_the_file_says_why_and_passes_the_check(init, sample):
    result = init("--val", str(sample / "val.jsonl"), "--gpu-memory", "24", "--output", "runs/a: b", "--yes")
    assert result.exit_code == 0 and "next: lookonce check run.yaml" in result.stdout
    text = Path("run.yaml").read_text()
    run = read_run_file(Path("run.yaml"))
    assert run.output == Path("runs/a: b") and run.data.val == [sample / "val.jsonl"] and run.data.test == []
    assert run.batch.samples_per_step == 16 and run.cache.max_pixels is None
    assert "# Proposed from 439 training records with 46 images (9.5 each), for a GPU of 24 GB." in text
    assert "# samples_per_step: with more, an epoch of 439 records would have fewer than 20 steps\n" in text
    checked = CliRunner().invoke(main, ["check", "run.yaml"])
    assert checked.exit_code == 0 and "\n0 errors, 1 warning; 508 records; " in checked.stdout, checked.stdout
    assert "-> lookonce cache build run.yaml" in checked.stdout


def test_a_template_that_thinks_is_told_not_to_and_the_file_passes_the_check(init, thinking_model):
    result = init("--model", str(thinking_model), "--yes")
    assert result.exit_code == 0 and re.search(r"^  data\.enable_thinking +false$", result.stdout, re.M)
    assert read_run_file(Path("run.yaml")).data.enable_thinking is False
    checked = CliRunner().invoke(main, ["check", "run.yaml"])
    assert checked.exit_code == 0 and "\n0 errors, " in checked.stdout, checked.stdout


def test_without_validation_records_it_says_how_to_split_them(init, sample):
    said = "no validation records: "
    for words in ((), ("--json",)):
        result = init(*words, "--yes", "--force")
        assert said in result.stderr and "lookonce data prepare SET.yaml DIR --source RECORDS" in result.stderr
    assert "# data.val is not set, so there are no validation records: " in Path("run.yaml").read_text()
    assert said not in init("--val", str(sample / "val.jsonl"), "--yes", "--force").output


@pytest.mark.parametrize("column", ["struct", "struct with a name", "binary"])
def test_an_image_in_several_rows_of_a_parquet_file_counts_as_one(init, sample, column):
    files = [b"no image"]
    for seed in range(3):
        Image.effect_noise((64, 48), 80 + seed).convert("RGBA").save(file := io.BytesIO(), "PNG")
        files.append(file.getvalue())
    images = [files[number % 4] for number in range(20)]
    name = "all.png" if column.endswith("name") else None
    values = images if column == "binary" else [{"bytes": data, "path": name} for data in images]
    table = {"image": values, "question": [f"Is it {number}?" for number in range(20)], "answer": ["yes"] * 20}
    parquet.write_table(pa.table(table), "train.parquet", row_group_size=6)
    init("--model", str(sample / "model"), "--train", "train.parquet", "--yes", given=False)
    assert "from 20 training records with 4 images (5.0 each)" in Path("run.yaml").read_text()
    checked = json.loads(CliRunner().invoke(main, ["check", "run.yaml", "--json"]).stdout)["results"]
    assert "train: 20 records with 4 images" in [one["value"] for one in checked]
    found = [one["value"] for one in checked if one["what"] in ("images", "cache")]
    assert found[0].startswith("3 images to encode; ") and found[1].startswith("1 image of 5 records cannot be used: ")
    audited = json.loads(CliRunner().invoke(main, ["data", "audit", "train.parquet", "--json"]).stdout)
    counts = {one["code"]: one["count"] for one in audited["findings"]}
    assert (counts["images-broken"], counts["images-alpha"], counts.get("copies")) == (1, 3, None)


def test_json_has_the_values_and_their_reasons(init):
    value = json.loads(init("--json", "--yes").stdout)
    assert value["run_file"] == "run.yaml" and value["facts"]["num_records"] == 439
    assert {"batch.samples_per_step", "batch.tokens_per_pack"} == {
        one["key"] for one in value["proposals"] if one["reason"]
    }


def test_an_existing_file_is_kept_without_force(init):
    Path("run.yaml").write_text("mine")
    result = init("--yes")
    assert result.exit_code == 2 and "run.yaml exists; name another file, or replace it with --force" in result.stderr
    assert Path("run.yaml").read_text() == "mine"
    assert init("--yes", "--force").exit_code == 0 and "model:" in Path("run.yaml").read_text()


def test_nothing_is_asked_without_a_terminal_and_what_is_missing_is_named(init):
    result = init(given=False)
    assert result.exit_code == 2 and "--model and --train must be given" in result.stderr
    assert not Path("run.yaml").exists()


def test_a_terminal_is_asked_for_what_is_missing(init, sample):
    answers = [str(sample / "model"), str(sample / "train.jsonl"), str(sample / "val.jsonl"), "", "40", ""]
    result = init(given=False, answers="\n".join([*answers, ""]))
    assert result.exit_code == 0, result.stderr
    values = yaml.safe_load(Path("run.yaml").read_text())
    assert values["model"]["path"] == answers[0] and values["data"] == {"train": answers[1], "val": answers[2]}
    assert values["output"] == "runs/first" and "a GPU of 40 GB" in Path("run.yaml").read_text()
    assert "Records to train on" in result.stderr and "Records to train on" not in result.stdout


def test_wrong_values_and_records_are_errors_and_write_nothing(init, monkeypatch):
    monkeypatch.delenv("UNSET", raising=False)
    for words, message in (
        (("--output", "$UNSET/a"), "UNSET is not set"),
        (("--train", "no.jsonl"), "no records file"),
    ):
        result = init(*words, "--yes")
        assert result.exit_code in (1, 2) and message in result.stderr and not Path("run.yaml").exists()
