"""A run that was trained with relative paths is found from every working directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lookonce.cli import main
from lookonce.run.config import RunFile

QUICK = ("train.steps=2", "train.precision=fp32", "eval.max_new_tokens=2", "cache.dtype=float32")


def lookonce(*words: str) -> Result:
    result = CliRunner().invoke(main, list(words))
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture
def home(sample, tmp_path, monkeypatch) -> Path:
    """A project folder with the sample's data, as working directory."""
    home = tmp_path / "home"
    shutil.copytree(sample, home / "data")
    few = (home / "data" / "test.jsonl").read_text().splitlines(keepends=True)[:6]
    (home / "data" / "test.jsonl").write_text("".join(few))
    monkeypatch.chdir(home)
    return home


@pytest.mark.guarantee("A run with relative paths is evaluated from any working directory.")
def test_from_the_first_run_file_to_an_evaluation_elsewhere(home, tmp_path, monkeypatch):
    given = ("--model", "data/model", "--train", "data/train.jsonl", "--test", "data/test.jsonl", "--yes")
    assert lookonce("init", "run.yaml", *given).exit_code == 0
    settings = [word for one in QUICK for word in ("--set", one)]
    assert lookonce("check", "run.yaml", *settings).exit_code == 0
    assert lookonce("cache", "build", "run.yaml", *settings).exit_code == 0
    found = json.loads(lookonce("check", "run.yaml", *settings, "--json").stdout)
    assert [one["what"] for one in found["results"] if one["level"] != "ok"] == ["evaluation"]  # no data.val
    assert lookonce("train", "run.yaml", *settings).exit_code == 0
    run = RunFile.model_validate(json.loads((home / "runs" / "first" / "run.json").read_text())["run"])
    paths = [Path(run.model.path), *run.data.train, *run.data.test, run.cache.dir, run.output]
    assert all(path.is_absolute() and path.exists() for path in paths)

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    result = lookonce("eval", str(home / "runs" / "first"), "--split", "test")
    assert result.exit_code == 0, result.stderr
    assert (home / "runs" / "first" / "metrics" / "test.json").exists()
    again = lookonce("train", str(home / "runs" / "first" / "run.yaml"))
    assert again.exit_code == 0 and "already trained" in again.stderr
    assert list(Path.cwd().iterdir()) == []

    wrong = lookonce("cache", "verify", str(home / "run.yaml"), "--set", f"model.path={home}/data/model", *settings)
    here = Path.cwd() / "caches"
    assert (
        wrong.exit_code == 1 and f"{here}/" in wrong.stderr and "is relative to the working directory" in wrong.stderr
    )
