"""The page `docs/afternoon.md`: its commands are run in their order, on the sample, and print what the page shows.

What stands in for what the page names, so that its commands can be run as they are written:

| page                         | test                                                                               |
|------------------------------|------------------------------------------------------------------------------------|
| Kvasir-VQA on the Hub        | a folder with the rows and images of a part of the sample, named by `--source`     |
| Qwen/Qwen3-VL-8B-Instruct    | the sample's tiny model, under this name on a local Hub                            |
| your-name/...                | an empty repository on a local Hub, and a token that may write to it               |
| frame.jpg                    | a frame of the sample                                                              |
| 3 epochs, and 1 epoch        | a few steps, which the run file says after `lookonce init`; `train.epochs=1` fewer |
| what is typed into an answer | a question, and `/quit`                                                            |

`NOT_RUN` lists the commands that cannot be run here, each with a reason and with what is checked in their place.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.datasets.records import read_records

MODEL, TOKEN = "Qwen/Qwen3-VL-8B-Instruct", "hf_secret"
NUM_FRAMES = 40
"""The frames of the sample that are used: all have the same questions, and fewer take less time."""
SHORT = {
    "cache": {"dtype": "float32"},
    "batch": {"samples_per_step": 8},
    "train": {"epochs": 0.2, "precision": "fp32"},
    "eval": {"max_new_tokens": 4},
}
"""What the run file says in addition, so that a CPU trains and answers in seconds."""
REPLACED = {"train.epochs=1": "train.epochs=0.1"}
ADDED = {("data", "prepare"): ["--source", "downloads"]}
TYPED = "Is there text?\n/quit\n"

Blocks = list[tuple[str, str]]


@pytest.fixture
def page(root: Path) -> str:
    return (root / "docs" / "afternoon.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's working directory, with a frame, and Kvasir-VQA's rows in `downloads`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "downloads").mkdir()
    rows = [json.dumps(row) for row in published_rows(sample)]
    (tmp_path / "downloads" / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "downloads" / "images").symlink_to(sample / "images")
    shutil.copy(sample / "images" / "frame-0026.jpg", tmp_path / "frame.jpg")
    return tmp_path


def published_rows(sample: Path) -> Iterator[dict[str, str]]:
    """Questions of the sample with the columns that Kvasir-VQA has."""
    for split in ("train", "val", "test"):
        for record in read_records(sample / f"{split}.jsonl"):
            name = record.metadata["image_id"]
            if int(name.rpartition("-")[2]) < NUM_FRAMES:
                [turn] = record.turns
                row = {"question": turn.question, "answer": turn.answer, "img_id": name}
                yield row | {"image": f"{name}.jpg", "source": record.metadata["source"]}


def blocks(page: str) -> Blocks:
    """Language and content of each code block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)


def commands(block: str) -> list[list[str]]:
    """The words of each command of a block."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def test_every_command_of_the_page_runs_and_prints_what_the_page_shows(page, folder, root, sample, make_hub):
    make_hub(MODEL, "models", {path.name: path.read_bytes() for path in (sample / "model").iterdir()}, [])
    printed, number = "", 0
    for language, block in blocks(page):
        if language != "sh":
            assert language == "", f"a block of {language}: commands are in blocks of sh, what they print in plain ones"
            assert not_printed(block, printed) == []
            continue
        printed = ""
        for words in commands(block):
            printed += follow(words, root, make_hub)
            number += 1
    assert number > 20
    assert lookonce(["status", "run.yaml", "--missing"]).strip() == "", "what slurm/submit.sh would submit"


def follow(words: list[str], root: Path, make_hub: Callable[..., Any]) -> str:
    """Do what the page says; returns what is printed."""
    if words[0] != "lookonce":
        check_without_running(words, root)
        return ""
    words = [REPLACED.get(word, word) for word in words[1:]]
    if words[:2] == ["adapter", "push"]:
        hub = make_hub(words[3], "models", {}, [])
        hub.exists, hub.token = False, TOKEN
    printed = lookonce(words + ADDED.get((words[0], words[1]), []))
    if words[0] == "init":
        shorten(Path(words[1]))
    if words[:2] == ["adapter", "push"]:
        assert ("README.md" in hub.files) is ("--dry-run" not in words)
    return printed


def lookonce(words: list[str]) -> str:
    """Run a command, which must not fail; returns what it prints."""
    done = CliRunner().invoke(main, words, input=TYPED)
    assert done.exit_code == 0, f"lookonce {shlex.join(words)}\n{done.output}"
    return f"{done.stdout}\n{done.stderr}"


def shorten(run_file: Path) -> None:
    """Make the run of a run file a short one."""
    run = yaml.safe_load(run_file.read_text())
    for section, values in SHORT.items():
        run[section] = run.get(section, {}) | values
    run_file.write_text(yaml.safe_dump(run))


def not_printed(shown: str, printed: str) -> list[str]:
    """The lines that the page shows and no command has printed, with any numbers."""
    found = {masked(line) for line in printed.splitlines()}
    return [line for line in shown.splitlines() if line and masked(line) not in found]


def masked(line: str) -> str:
    """A line without its numbers, commits, units of bytes and time, and the width of its columns."""
    line = re.sub(r"\b(?=[a-z]*\d)[0-9a-f]{12,}\b|[-+<]?\d[\d.,]*\b", "#", line)
    line = re.sub(r"# [kMG]?B\b|(?:# (?:h|min) )?# m?s\b", "#", line)
    return " ".join(line.split())


def check_without_running(words: list[str], root: Path) -> None:
    """Check a command that cannot be run here, as far as possible; one that is not listed fails."""
    [check] = [check for begin, check in NOT_RUN.items() if words[: len(begin)] == list(begin)] or [None]
    assert check, f"{shlex.join(words)}: the test neither runs nor knows this command"
    check(words, root)


def has_target(words: list[str], root: Path) -> None:
    """`make setup` installs packages for minutes."""
    assert words[1:] == ["setup"] and re.search(r"^setup:", (root / "Makefile").read_text(), re.M)


def is_made_by_setup(words: list[str], root: Path) -> None:
    """`. .venv/bin/activate` changes the reader's shell, by a file that `make setup` writes."""
    assert words[1:] == [".venv/bin/activate"] and ".venv" in (root / "Makefile").read_text()


def is_a_command_of_the_hub(words: list[str], root: Path) -> None:
    """`hf auth login` asks for a token on a terminal."""
    assert words[1:] == ["auth", "login"] and "hf" in distribution("huggingface_hub").entry_points.names


def is_a_job(words: list[str], root: Path) -> None:
    """What submits jobs needs a Slurm cluster: the script is one, and gets what its usage line asks for."""
    script, *arguments = words[1:] if words[0] == "sbatch" else words
    text = (root / script).read_text()
    assert subprocess.run(["bash", "-n", root / script]).returncode == 0
    needed = re.search(rf"usage: (?:sbatch )?{re.escape(script)} ([^\[}}\"]*)", text)[1].split()
    assert len(arguments) >= len(needed) and Path(arguments[0]).is_file()


NOT_RUN: dict[tuple[str, ...], Callable[[list[str], Path], None]] = {
    ("make",): has_target,
    (".",): is_made_by_setup,
    ("hf", "auth"): is_a_command_of_the_hub,
    ("slurm/submit.sh",): is_a_job,
    ("sbatch",): is_a_job,
}
