"""The command line: help with examples, exit codes, data on stdout, errors without a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from lookonce.cli import main
from lookonce.errors import CacheError, UsageError


def commands(command: click.Command = main, names: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """Every command by the words that call it."""
    found = {names: command}
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            found |= commands(child, (*names, name))
    return found


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def run_file(make_run, tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(make_run().to_yaml())
    return path


@pytest.mark.parametrize("names", commands(), ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_has_help_and_every_leaf_has_examples(names, flag):
    result = run(*names, flag)
    assert result.exit_code == 0
    assert isinstance(commands()[names], click.Group) or "Examples:" in result.stdout


@pytest.mark.parametrize("names", commands(), ids=" ".join)
def test_examples_in_help_are_commands_that_parse(names):
    examples = [line.split() for line in run(*names, "-h").stdout.splitlines() if line.startswith("    lookonce ")]
    for words in examples:
        arguments = [word.strip('"') for word in words[1:]]
        found = max((name for name in commands() if tuple(arguments[: len(name)]) == name), key=len)
        options = {option for parameter in commands()[found].params for option in parameter.opts}
        assert not isinstance(commands()[found], click.Group)
        assert {word for word in arguments if word.startswith("--")} <= options


def test_all_that_report_can_print_json():
    leaves = {names: command for names, command in commands().items() if not isinstance(command, click.Group)}
    assert all(any("--json" in parameter.opts for parameter in command.params) for command in leaves.values())


def test_the_phases_report_json_on_stdout_alone(run_file):
    plan = run("cache", "plan", run_file, "--json")
    assert json.loads(plan.stdout)["num_images"] == 64
    built = json.loads(run("cache", "build", run_file, "--json").stdout)
    assert (built["num_encoded"], built["num_reused"]) == (64, 0)
    again = run("cache", "build", run_file)
    assert "nothing new encoded, 64 of 64 images reused" in again.stdout
    assert json.loads(run("cache", "status", run_file, "--json").stdout)["num_done"] == 64


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("cache", "build", "nothing.yaml"), 2, "nothing.yaml"),
        (("train", "RUN", "--set", "train.epoch=3"), 2, "did you mean `epochs`?"),
        (("train", "RUN"), 1, "make it with: lookonce cache build"),
        (("train", "RUN", "--set", "model.path=nowhere"), 1, "no model folder at"),
        (("train", "RUN", "--set", "data.train=nowhere.jsonl"), 1, "no records file at"),
        (("eval", "nowhere"), 1, "is no run's folder; make one with: lookonce train"),
        (("predict", "nowhere", "--image", "x.jpg", "--question", "q"), 1, "is no run's folder"),
        (("no-such-command",), 2, "No such command"),
        (("train",), 2, "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_give_a_message_and_an_exit_code_without_a_traceback(run_file, words, code, message):
    result = run(*(run_file if word == "RUN" else word for word in words))
    assert result.exit_code == code
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("no"), 2, "Error: no"),
        (CacheError("gone"), 1, "Error: gone"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (KeyboardInterrupt(), 130, "the same command goes on"),
        (
            ZeroDivisionError("division by zero"),
            1,
            "unexpected ZeroDivisionError: division by zero (`lookonce --debug ...` shows",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_goes_wrong_is_a_message(monkeypatch, run_file, error, code, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("lookonce.train.run_file.read_run_file", fail)
    result = run("cache", "build", run_file)
    assert result.exit_code == code and message in result.stderr
    assert "Traceback" not in result.stderr


def test_debug_shows_where():
    result = run("--debug", "cache", "build", "nothing.yaml")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "run_file.py" in result.stderr
