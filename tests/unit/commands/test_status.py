"""`lookonce status` ends quietly when it is interrupted."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from lookonce.cli import main


@pytest.mark.parametrize("words", [(), ("--watch", "1"), ("--missing",)])
@pytest.mark.parametrize("where", ["lookonce.run.config.read_run_file", "lookonce.status.status.RunStatus.open"])
def test_ctrl_c_ends_it_without_a_message(monkeypatch, run_file, where, words):
    """It asked to run the same command again to resume, though it had not begun anything."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    done = CliRunner().invoke(main, ["status", str(run_file), *words])
    assert (done.exit_code, done.stdout, done.stderr) == (130, "", "")
