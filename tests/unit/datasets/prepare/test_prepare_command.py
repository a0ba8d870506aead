"""`lookonce data prepare`: what it prints, and how it refuses mistakes."""

from __future__ import annotations

from pathlib import Path

import yaml
from click.testing import Result
from support.rows import run as run_command

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


def test_a_cut_report_is_named(tmp_path, source):
    assert run("kvasir-vqa", tmp_path / "out", "--source", source).exit_code == 0
    (tmp_path / "out" / "report.json").write_text("")
    result = run("kvasir-vqa", tmp_path / "out", "--source", source)
    assert result.exit_code == 2 and "report.json is damaged, or of another program" in result.stderr
