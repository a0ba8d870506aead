"""Advice names the run file of the command, with the keys that the command replaces."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lookonce.commands.options import remember_run_file, with_run_file

ADVICE = "continue with: lookonce train RUN.yaml --resume"


@pytest.mark.parametrize(
    ("noted", "expected"),
    [
        ([(Path("a b.yaml"), ())], "lookonce train 'a b.yaml' --resume"),
        (
            [(Path("a.yaml"), ("output=runs/b", "data.val=[x, y]"))],
            "lookonce train a.yaml --set output=runs/b --set 'data.val=[x, y]' --resume",
        ),
        ([(Path("no-file.yaml"), ())], "lookonce train RUN.yaml --resume"),
        ([], "lookonce train RUN.yaml --resume"),
    ],
)
def test_the_placeholder_is_replaced_by_the_run_file(noted, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a b.yaml", "a.yaml"):
        Path(name).touch()

    @click.command()
    def command() -> None:
        for path, assignments in noted:
            remember_run_file(path, assignments)
        click.echo(with_run_file(ADVICE))

    assert CliRunner().invoke(command).stdout == f"continue with: {expected}\n"
