"""`lookonce data prepare`: what it prints, and how it refuses mistakes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from support.rows import run as run_command

from lookonce.datasets.prepare.run import WORK
from lookonce.datasets.records import read_records
from lookonce.run.config import RunFile


def run(*words: object) -> Result:
    return run_command("data", "prepare", *words)


def test_the_command_prints_licence_table_and_next_steps(tmp_path, source):
    result = run("kvasir-vqa", tmp_path / "out", "--source", source)
    assert result.exit_code == 0, result.stderr
    assert "CC BY-NC 4.0" in result.stdout and "typos in questions" in result.stdout
    assert f"lookonce data audit {tmp_path / 'out'}/*.jsonl" in result.stderr
    section = result.stderr.partition("data:\n")[2]
    data = yaml.safe_load("data:\n" + section)["data"]
    RunFile.model_validate({"model": {"path": "m"}, "data": data, "output": "o"})
    assert all(read_records(Path(path)) for path in data.values())
    again = run("kvasir-vqa", tmp_path / "out", "--source", source)
    assert again.stdout == result.stdout and "is already prepared" in again.stderr


@pytest.mark.parametrize("mistake", ["definition", "source", "cut record of the work"])
def test_a_failed_try_does_not_refuse_the_next_one(tmp_path, root, source, mistake):
    """A definition or a source is mended, and the same command runs again in the same folder."""
    definition = yaml.safe_load((root / "datasets" / "kvasir-vqa.yaml").read_text())
    own, out, copy = tmp_path / "own.yaml", tmp_path / "out", shutil.copytree(source, tmp_path / "copy")
    columns = definition["columns"] | ({"question": "no such column"} if mistake == "definition" else {})
    own.write_text(yaml.safe_dump(definition | {"columns": columns}))
    if mistake == "source":
        (part := next(copy.glob("*.parquet"))).write_bytes(part.read_bytes()[:200])
    elif mistake == "cut record of the work":
        (out / WORK).mkdir(parents=True)
        (out / WORK / "settings.json").write_text('{"version"')
    failed = run(own, out, "--source", copy)
    assert (failed.exit_code != 0) == (mistake != "cut record of the work"), failed.output
    assert "unexpected" not in failed.stderr
    own.write_text(yaml.safe_dump(definition))
    again = run(own, out, "--source", source)
    assert again.exit_code == 0, again.stderr
    assert {path.name for path in out.iterdir()} >= {"train.jsonl", "images", "report.json"}


def test_a_cut_report_is_named(tmp_path, source):
    assert run("kvasir-vqa", tmp_path / "out", "--source", source).exit_code == 0
    (tmp_path / "out" / "report.json").write_text("")
    result = run("kvasir-vqa", tmp_path / "out", "--source", source)
    assert result.exit_code == 2 and "report.json is cut, or no report of lookonce data prepare" in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("kvasir", "OUT"), 2, "no known dataset is called 'kvasir'"),
        (("slake", "OUT"), 1, "is not downloaded"),
        (("kvasir-vqa", "OUT", "--source", "nowhere"), 1, "nothing exists at nowhere"),
        (("kvasir-vqa", "SOURCE", "--source", "SOURCE"), 2, "is not empty and holds no prepared dataset"),
        (("kvasir-vqa",), 2, "Missing argument"),
    ],
)
def test_mistakes_give_a_message_and_an_exit_code_without_a_traceback(tmp_path, source, words, code, message):
    places = {"OUT": tmp_path / "out", "SOURCE": source}
    result = run(*(places.get(word, word) for word in words))
    assert result.exit_code == code and message in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr and not (tmp_path / "out").exists()
