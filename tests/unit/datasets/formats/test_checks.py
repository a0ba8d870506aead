"""What no training could use is refused as a record is read, by every command, with file, line and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from lookonce.cli import main
from lookonce.families.family import CONTROL_TOKENS

HALF = "holds half a character (a lone surrogate)"
FLAT = {"image": "a.jpg", "question": "Q", "answer": "A"}
ONE = {"images": [], "turns": [{"question": "Q", "answer": "A"}]}
CHAT = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "surrogate in metadata": (ONE | {"metadata": {"note": "\ud800"}}, f"`note` {HALF}"),
    "surrogate deep in metadata": (ONE | {"metadata": {"a": [{"b": {"c": "\udfff"}}]}}, f"`a.b.c` {HALF}"),
    "surrogate in a key": (ONE | {"metadata": {"a": {"\ud800": 1}}}, f"a key of `a` {HALF}"),
    "surrogate in a flat key": (FLAT | {"\ud800": 1}, f"a key of `metadata` {HALF}"),
    "surrogate in an id": (CHAT | {"id": "\ud800"}, f"`id` {HALF}"),
    "surrogate in a system text": (ONE | {"system": "\ud800"}, f"`system` {HALF}"),
    "surrogate in an image name": (CHAT | {"images": ["\ud800.jpg"]}, f"`image` {HALF}"),
    "file name that is not UTF-8": (CHAT | {"images": ["file:///caf%E9.jpg"]}, "is not UTF-8, in which results name"),
    "deep metadata": (ONE | {"metadata": {"a": deep(60)}}, "`a` is nested more than 50 deep; leave it out"),
    "deeper metadata": (CHAT | {"a": deep(900)}, "nested more than 50 deep"),
}  # fmt: skip
for token in CONTROL_TOKENS:
    BAD[f"{token} in a question"] = (
        CHAT | {"messages": [CHAT["messages"][0] | {"content": f"Is {token} it?"}, CHAT["messages"][1]]},
        "the image mark" if token == "<|image_pad|>" else f"`question` contains {token}, a special token of the model",
    )
BAD["token in an answer"] = (
    {"image": "a.jpg", "question": "Q", "answer": "no<|im_end|>"},
    "`answer` contains <|im_end|>, a special token of the model, got 'no<|im_end|>'; remove it",
)
BAD["token in a system text"] = (ONE | {"system": "<|im_start|>"}, "`system` contains <|im_start|>")
BAD["token in a reference"] = (
    ONE | {"metadata": {"references": ["A", "<|im_end|>"]}},
    "`references` contains <|im_end|>",
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(main, words)


@pytest.mark.parametrize(("row", "says"), BAD.values(), ids=BAD.keys())
def test_a_bad_record_is_refused_by_every_command_that_reads_records(run, tmp_path, sample, row, says):
    (tmp_path / "r.jsonl").write_text(f"{json.dumps(CHAT if 'messages' in row else ONE)}\n{json.dumps(row)}\n")
    (tmp_path / "run.yaml").write_text(f"model: {{path: {sample}/model}}\ndata: {{train: r.jsonl}}\noutput: out\n")

    def told(result: Result) -> None:
        assert result.exit_code == 1 and "unexpected" not in result.output, result.output
        assert says in result.output and "r.jsonl:2" in result.output

    told(run("data", "convert", "r.jsonl", "out.jsonl"))
    told(run("data", "tar", "r.jsonl", "tars"))
    told(run("check", "run.yaml", "--json"))
    audit = run("data", "audit", "r.jsonl", "--json")
    found = {one["code"]: one for one in json.loads(audit.stdout)["findings"]}
    assert found["malformed"]["items"][0]["places"] == ["r.jsonl:2"]
    cleaned = run("data", "clean", "r.jsonl", "clean.jsonl")
    assert cleaned.exit_code == 0 and len((tmp_path / "clean.jsonl").read_text().splitlines()) == 1


UNUSUAL = {
    "nan": float("nan"),
    "inf": -float("inf"),
    "large": 10**4000,
    "deep": deep(40),
    "nul": "\0",
    "esc": "\x1b[1m",
}


def test_unusual_metadata_passes_every_command(run, tmp_path):
    row = ONE | {"metadata": UNUSUAL | {"category": float("nan"), "stage": 10**400, "source": deep(30)}}
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    for words in (("convert", "r.jsonl", "out.jsonl"), ("clean", "r.jsonl", "clean.jsonl"), ("audit", "r.jsonl")):
        result = run("data", *words)
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out.jsonl").read_text())["metadata"]["deep"] == deep(40)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"question": "\ud800"}, HALF),
        ({"note": "\ud800"}, HALF),
        ({"\ud800": 1}, HALF),
        ({"answer": "<|im_end|>"}, "token"),
    ],
    ids=repr,
)
def test_prepare_refuses_what_no_training_could_use(run, tmp_path, values, says):
    Image.new("RGB", (40, 40)).save(tmp_path / "a.jpg")
    (tmp_path / "my.yaml").write_text("name: my\ncolumns: {metadata: {note: note}}\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps(FLAT | values))
    result = run("data", "prepare", "my.yaml", "out", "--source", "rows.jsonl")
    assert result.exit_code == 1 and says in result.output and "rows.jsonl:1" in result.output, result.output


def test_the_special_tokens_of_the_published_tokenizer_are_refused_and_its_other_added_tokens_are_text(
    run, real_processor
):
    added = json.loads((real_processor / "tokenizer_config.json").read_text())["added_tokens_decoder"].values()
    assert {token["content"] for token in added if token["special"]} <= {*CONTROL_TOKENS}
    assert not {token["content"] for token in added if not token["special"]} & {*CONTROL_TOKENS}
    Path("r.jsonl").write_text(json.dumps(FLAT | {"answer": "<think>It is red.</think>yes"}))
    assert run("data", "convert", "r.jsonl", "o.jsonl").exit_code == 0
