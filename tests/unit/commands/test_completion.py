"""`lookonce completion`: click's script for each shell, and what it completes."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.commands.completion import SHELLS, VARIABLE


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o nosort -F _lookonce_completion lookonce"),
        ("zsh", "compdef _lookonce_completion lookonce"),
        ("fish", "complete --no-files --command lookonce"),
    ],
)
def test_the_script_registers_itself_and_asks_this_program(shell, registers):
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0 and done.stderr == ""
    assert registers in done.stdout and f"_LOOKONCE_COMPLETE={shell}_complete" in done.stdout


def test_another_shell_is_refused_with_those_there_are():
    done = CliRunner().invoke(main, ["completion", "csh"])
    assert done.exit_code == 2 and all(shell in done.stderr for shell in SHELLS)


@pytest.mark.parametrize(
    ("words", "typed", "expected"),
    [
        ([], "comp", {"compare", "completion"}),
        (["cache"], "re", {"repair"}),
        (["eval"], "--spl", {"--split"}),
        (["eval", "--split"], "t", {"train", "test"}),
        (["completion"], "", set(SHELLS)),
    ],
)
def test_commands_options_and_choices_are_completed(words, typed, expected):
    found = ShellComplete(main, {}, "lookonce", VARIABLE).get_completions(words, typed)
    assert {item.value for item in found} == expected


def test_a_run_file_is_completed_as_a_file():
    [found] = ShellComplete(main, {}, "lookonce", VARIABLE).get_completions(["train"], "exp")
    assert found.type == "file"
