"""`lookonce train`: what is on stdout and on stderr."""

from __future__ import annotations

import json

from click.testing import CliRunner

from lookonce.cli import main


class FakeSummary:
    def to_json(self):
        return {"num_steps": 3}

    def text(self):
        return "3 steps"


def test_json_on_stdout_is_alone_whatever_libraries_print(run_file, monkeypatch):
    def train(run, **options):
        print("[INFO] Running in WANDB offline mode")
        options["notify"]("read records: 0.1 s")
        return FakeSummary()

    monkeypatch.setattr("lookonce.workflow.train", train)
    result = CliRunner().invoke(main, ["train", str(run_file), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"num_steps": 3}
    said = result.stderr.splitlines()
    assert said[0].startswith("load libraries: ") and said[1:] == [
        "[INFO] Running in WANDB offline mode",
        "read records: 0.1 s",
    ]
