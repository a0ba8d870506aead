"""Names and texts from data cannot control a terminal: every command prints them with escapes, and JSON stays JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from PIL import Image
from support.rows import run as invoke
from support.rows import write_lines

ENDS = ("\x1b[31m", "\nError: forged", "\r", "\x9b2J", "\u202egpj", "\x07\x08", "\u2028")
NAMES = [f"a{end}.jpg" for end in ENDS]
SHOWN = [ascii(name).strip("'") for name in NAMES]
RAW = re.compile(r"[^\n\t\x20-\x7e\xa1-\u024f]")
"""What no output has: these tests use letters of Latin alone."""
BAR = re.compile(r"\r[\w ]+: +\d+%\|.*?(?=\r|\n|$)|\r(?=\n)")
"""Progress bars of libraries, on stderr."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sample: Path) -> Callable[..., Result]:
    """A run whose images have such names: one is missing, one is broken, one is empty, and the others are whole."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for number, name in enumerate(NAMES):
        if number not in (0, 1, 2):
            Image.new("RGB", (64, 64), (number, 9, 9)).save(name, "JPEG")
        rows.append({"image": name, "question": "Is it\x1b[2J?", "answer": f"yes \x1b]0;x\x07{number}", "source": name})
    Path(NAMES[1]).write_bytes(b"no image")
    Path(NAMES[2]).write_bytes(b"")
    write_lines(Path("r.jsonl"), *rows)
    Path("run.yaml").write_text(
        f"model: {{path: {sample / 'model'}}}\ndata: {{train: r.jsonl, val: r.jsonl}}\n"
        "cache: {dir: caches, dtype: float32, shard_mb: 1}\nlora: {rank: 4}\n"
        "train: {steps: 1, precision: fp32}\noutput: out\n"
    )
    return invoke


COMMANDS = (
    ("data", "audit", "r.jsonl", "--decode"),
    ("data", "convert", "r.jsonl", "deeper/out.csv", "--out-image-root", "deeper"),
    ("check", "run.yaml"),
    ("status", "run.yaml"),
    ("cache", "plan", "run.yaml"),
    ("cache", "build", "run.yaml"),
    ("status", "run.yaml"),
    ("cache", "verify", "run.yaml"),
    ("cache", "show", "run.yaml", NAMES[3]),
    ("train", "run.yaml"),
    ("init", "r.yaml", "--model", "none/none", "--train", "r.jsonl", "--yes"),
)


def test_no_command_prints_control_characters_of_data(run):
    named = set()
    for words in COMMANDS:
        for more in ((), ("--json",)) if words[0] not in ("train", "init") else ((),):
            Path("clean.jsonl").unlink(missing_ok=True)
            result = run(*words, *more)
            assert not isinstance(result.exception, UnicodeError) and "unexpected" not in result.output, result.output
            output = BAR.sub("", result.output)
            assert not RAW.search(output), (words, RAW.search(output), output)
            assert "\nError: forged" not in output, (words, output)
            named |= {name for name in SHOWN if name in output}
            if more and result.stdout:
                json.loads(result.stdout)
    assert named >= {*SHOWN[:3]}


def test_json_has_the_texts_as_they_are(run):
    found = json.loads(run("data", "audit", "r.jsonl", "--json").stdout)
    assert {item["question"] for item in found["questions"]} == {"Is it\x1b[2J?"}
    images = {item["image"] for finding in found["findings"] for item in finding["items"] if "image" in item}
    assert {Path(image).name for image in images} >= {NAMES[0]}


def test_all_commands_print_in_one_place(root):
    """`say` escapes."""
    commands = (root / "src" / "lookonce" / "commands").rglob("*.py")
    found = {path.name for path in commands if "click.echo" in path.read_text()}
    assert found == {"options.py"}
