"""A file of a run folder that is empty, cut or of another form is named by every command that reads it."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lookonce.claim_file import Process
from lookonce.cli import main
from lookonce.run.folder import RunFolder
from lookonce.workflow import train

LIGHT = {
    "status": ("status", "run.yaml"),
    "train": ("train", "run.yaml"),
    "train --resume": ("train", "run.yaml", "--resume"),
    "report": ("report", "run", "-o", "page.html"),
    "compare": ("compare", "run", "other"),
    "export": ("export", "run", "--to", "medvqa-gi", "-o", "answers.json"),
    "push": ("adapter", "push", "run", "me/kvasir", "--dry-run", "--base-model", "me/base"),
    "check": ("adapter", "check", "run", "--for", "vllm"),
}
"""Commands that read a run folder and take less than a second."""
HEAVY = {
    "eval": ("eval", "run"),
    "predict": ("predict", "run", "--image", "a.jpg", "--question", "Is there text?"),
    "ask": ("ask", "run", "a.jpg"),
    "merge": ("adapter", "merge", "run", "merged"),
    "start": ("train", "other.yaml", "--set", "train.start_from=run", "--set", "output=third"),
}
BROKEN: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "list": lambda text: "[3]",
    "no keys": lambda text: "{}",
    "other types": lambda text: json.dumps({key: "seven" for key in json.loads(text)}),
}
FILES = ("run.json", "trained.json", "summary.json", "environment.json", "metrics/val.json", "answering/val.json")


@pytest.fixture(scope="module")
def finished(make_run_in, built, sample, tmp_path_factory) -> Path:
    """A folder with a finished run, another one, and their run files."""
    folder = tmp_path_factory.mktemp("finished")
    options = {
        "cache": {"dir": str(built.folder.parent)},
        "train": {"steps": 2, "save_steps": 1},
        "eval": {"max_new_tokens": 1},
    }
    for name in ("run", "other"):
        run = make_run_in(folder, **options, output=str(folder / name))
        train(run, notify=lambda note: None)
    shutil.copy(next((sample / "images").iterdir()), folder / "a.jpg")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    for name in ("run", "other"):
        text = (tmp_path / name / "run.yaml").read_text()
        (tmp_path / f"{name}.yaml").write_text(text.replace(str(finished), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return RunFolder(Path("run"))


def invoke(words: tuple[str, ...]) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, list(words), input="")


@pytest.mark.parametrize("name", FILES)
def test_a_broken_file_is_named_or_not_needed(run: RunFolder, name: str):
    path = run.folder / name
    written, refusals = path.read_text(), 0
    for how, broken in BROKEN.items():
        for command, words in LIGHT.items():
            path.write_text(broken(written))
            result = invoke(words)
            said = f"{name} {how}: lookonce {command}\n{result.output}"
            assert "unexpected" not in result.output, said
            assert result.exit_code == 0 or str(Path(name)) in result.stderr.replace("\n", ""), said
            refusals += result.exit_code != 0
            for made in ("page.html", "answers.json"):
                Path(made).unlink(missing_ok=True)
    assert refusals >= len(BROKEN)


@pytest.mark.parametrize("command", HEAVY)
def test_slower_commands_name_a_broken_file_too(run: RunFolder, command: str):
    for name in ("run.json", "trained.json"):
        written = (run.folder / name).read_text()
        (run.folder / name).write_text(written[: len(written) // 2])
        result = invoke(HEAVY[command])
        assert "unexpected" not in result.output, result.output
        assert result.exit_code == 1 and name in result.stderr, result.output
        (run.folder / name).write_text(written)


def test_an_empty_file_of_answers_or_their_cost_is_written_again(run: RunFolder):
    for path in (run.predictions("val"), run.answering("val"), run.metrics("val")):
        written = path.read_bytes()
        path.write_text("")
        assert invoke(("compare", "run", "other")).exit_code == (1 if path == run.predictions("val") else 0)
        assert invoke(("eval", "run")).exit_code == 0
        assert path == run.answering("val") or path.read_bytes() == written


LOADING = ("eval", "predict", "ask", "merge", "start", "check", "push", "evaluate again")


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("adapter_model.safetensors", "flipped"),
        ("adapter_model.safetensors", "of another run"),
        ("adapter_config.json", "missing"),
        ("adapter_config.json", "of another run"),
    ],
)
def test_an_adapter_that_is_not_the_trained_one_is_never_used(run: RunFolder, file: str, how: str):
    """Whatever loads an adapter compares it with the hashes of what the training saved."""
    path, other = run.adapter / file, Path("other", "adapter", file)
    written = path.read_bytes()
    other.write_bytes(other.read_bytes()[:-1] + b" ")
    if how == "missing":
        path.unlink()
    else:
        middle = len(written) // 2
        flipped = (
            written[:middle] + bytes(255 - byte for byte in written[middle : middle + 50]) + written[middle + 50 :]
        )
        path.write_bytes(flipped if how == "flipped" else other.read_bytes())
    for command in LOADING:
        if command == "evaluate again":
            run.summary.unlink()
            result = invoke(LIGHT["train --resume"])
        else:
            result = invoke((LIGHT | HEAVY)[command])
        said = f"lookonce {command}\n{result.output}"
        assert result.exit_code == 1 and f"damaged or replaced: {file};" in result.stderr, said
        assert not Path("merged").exists() and not Path("third", "log.jsonl").exists()
    path.write_bytes(written)
    assert invoke(LIGHT["check"]).exit_code == 0


ODD = ("x", [3], math.inf)
READING = ("status", "report", "push")


@pytest.mark.parametrize("name", ["progress.json", "log.jsonl", "trained.json", "summary.json"])
def test_a_value_of_another_kind_is_named_or_left_out(run: RunFolder, name: str):
    path = run.folder / name
    written = path.read_text()
    first, *others = [written] if name.endswith("json") else written.splitlines()
    for key, odd in zip(json.loads(first), itertools.cycle(ODD), strict=False):
        path.write_text("\n".join([json.dumps(json.loads(first) | {key: odd}), *others]) + "\n")
        result = invoke(LIGHT["status" if name == "progress.json" else "report"])
        assert "unexpected" not in result.output, f"{key}: {odd!r}\n{result.output}"


@pytest.mark.parametrize(
    "line", ["[" * 100_000, "1" * 5_000, '{"step": 1e400, "loss": 1}', '{"step": 1, "time": 1e300}']
)
def test_an_odd_line_of_the_log_is_left_out(run: RunFolder, line: str):
    run.log.write_text(f"{line}\n{run.log.read_text()}")
    for command in READING:
        result = invoke(LIGHT[command])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("key", ["pid", "born", "job", "machine", "host", "name", "started", "command"])
def test_an_odd_claim_counts_until_it_expires(run: RunFolder, monkeypatch: pytest.MonkeyPatch, key: str):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for odd in ([3], math.nan, "7 (restart x)"):
        claim = {"worker": asdict(Process.this()), "command": "lookonce train", "started": 1.0}
        (claim if key in claim else claim["worker"])[key] = odd
        (run.folder / "claim.json").write_text(json.dumps(claim))
        result = invoke(LIGHT["train"])
        assert "unexpected" not in result.output, f"{key}: {odd!r}\n{result.output}"


def test_a_finished_run_without_its_adapter_is_not_said_to_be_trained_and_a_file_in_its_place_is_named(run: RunFolder):
    shutil.rmtree(run.adapter)
    result = invoke(LIGHT["train --resume"])
    assert result.exit_code == 1 and "is not the adapter that was trained" in result.stderr, result.output
    for path in (run.trained, run.summary):
        path.unlink()
    run.adapter.write_text("")
    result = invoke(LIGHT["train --resume"])
    assert "unexpected" not in result.output and "adapter" in result.stderr, result.output
