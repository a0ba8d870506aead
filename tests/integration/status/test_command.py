"""The command `lookonce status`: text, JSON, what is missing, and watching."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

from click.testing import CliRunner, Result

from lookonce.cli import main
from lookonce.status import next_command


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in ("status", *words)])


def test_missing_prints_one_line_per_phase_and_nothing_when_all_is_done(site, run_file):
    result = call(run_file, "--missing")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "plan\ncache\ntrain\neval\n", "")
    site.finish()
    result = call(run_file, "--missing")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    result = call(run_file, "--missing", "--set", "lora.rank=8")
    assert (result.exit_code, result.stdout) == (0, "train\neval\n") and "lora.rank" in result.stderr


def test_the_last_line_is_the_command_to_run_next(site, run_file):
    site.cache()
    result = call(run_file, "--set", "train.seed=1")
    assert result.stdout.splitlines()[-1].endswith(f"train {run_file} --set train.seed=1")


def test_json_has_the_keys_that_help_names(site, run_file):
    site.finish()
    value = json.loads(call(run_file, "--json").stdout)
    named = call("-h").stdout
    for keys in (value, value["cache"], value["training"]):
        assert all(key in named for key in keys if key not in ("is_trained", "is_evaluated")), keys.keys()
    assert (value["missing"], value["training"]["num_steps"], value["cache"]["num_shards"]) == ([], site.num_steps, 2)


def test_a_watch_prints_one_line_each_time_and_ends_when_all_is_done(site, run_file, monkeypatch):
    def train():
        shutil.rmtree(site.run.output)
        site.train()

    steps = iter([site.cache, site.begin, site.writes_progress, train])
    monkeypatch.setattr("lookonce.commands.train.time.sleep", lambda seconds: next(steps)())
    result = call(run_file, "--watch", 1)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) == 5 and next(steps, None) is None
    assert lines[0] == "cache no plan; training not begun; evaluation not yet"
    assert "cache 64/64 images; training step 1 of 2, loss 0.5000" in lines[3]
    assert "training finished" in lines[4]


def test_a_watch_on_a_terminal_shows_the_whole_state(site, run_file, monkeypatch):
    site.finish()
    terminal = SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("lookonce.commands.train.sys", terminal)
    assert call(run_file, "--watch", 1).stdout == call(run_file).stdout


def test_missing_cannot_be_watched(run_file):
    assert call(run_file, "--missing", "--watch", 1).exit_code == 2


def test_with_slurm_the_next_command_is_its_script(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "submit.sh").touch()
    monkeypatch.setattr("lookonce.status.shutil.which", lambda name: f"/bin/{name}")
    assert next_command(site.run, site.read(), Path("run.yaml"), ()) == "slurm/submit.sh run.yaml"
