"""The command `lookonce status`: text, JSON and what is missing."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_with_slurm_the_next_command_is_its_script(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "submit.sh").touch()
    monkeypatch.setattr("lookonce.status.shutil.which", lambda name: f"/bin/{name}")
    assert next_command(site.run, site.read(), Path("run.yaml"), ()) == "slurm/submit.sh run.yaml"
