"""`lookonce status` ends with one line when it is interrupted."""

from __future__ import annotations

import signal

import pytest
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.run.folder import RunFolder


@pytest.mark.parametrize("words", [(), ("--missing",)])
@pytest.mark.parametrize("where", ["lookonce.run.config.read_run_file", "lookonce.status.find_state"])
def test_ctrl_c_ends_it_with_one_line(monkeypatch, run_file, where, words):
    """It does not ask to resume, since it has not begun anything."""

    def interrupt(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(where, interrupt)
    done = CliRunner().invoke(main, ["status", str(run_file), *words])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "Error: interrupted; run the same command again\n")


def test_a_run_folder_is_taken_too_also_one_that_was_moved(monkeypatch, make_run, tmp_path):
    run, opened = make_run(), []
    RunFolder(run.output).claim(run, {})
    moved = run.output.rename(tmp_path / "moved")

    def interrupt(run):
        opened.append(run)
        raise KeyboardInterrupt

    monkeypatch.setattr("lookonce.status.find_state", interrupt)
    assert CliRunner().invoke(main, ["status", str(moved)]).exit_code == 130
    assert opened[0].output == moved and opened[0].train == run.train
    refused = CliRunner().invoke(main, ["status", str(moved), "--set", "train.epochs=2"])
    assert "is a folder; leave it out or name a run file" in refused.stderr
    assert "is not a run folder" in CliRunner().invoke(main, ["status", str(tmp_path)]).stderr
