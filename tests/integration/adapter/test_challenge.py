"""What `lookonce export --repo` writes: the organisers' tool takes it, and its answers are those of `lookonce eval`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from support.rows import run as invoke

from lookonce.datasets.records import Record, read_records
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.prediction import Prediction, read_predictions
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import TO_BUILD, open_run
from lookonce.workflow import train

NAME, BASE = "owner/adapter", "base-owner/base-model"
X1, PRIVATE_X1 = "SimulaMet/Kvasir-VQA-x1", "SimulaMet/Kvasir-VQA-x1-private"
GI, PRIVATE_GI = "SimulaMet/Kvasir-VQA-test", "SimulaMet/Kvasir-VQA-private"


@pytest.fixture(scope="module")
def trained(make_run_in: Callable[..., RunFile], tmp_path_factory) -> RunFolder:
    """An evaluated run with varied answers, some with spaces around them, about images of fewer pixels than usual."""
    run = make_run_in(
        tmp_path_factory.mktemp("challenge"),
        cache={"max_pixels": 20_000},
        train={"steps": 6, "learning_rate": 0.01},
        lora={"modules_to_save": ["embed_tokens"]},
        eval={"max_new_tokens": 6},
    )
    open_run(run, TO_BUILD).build()
    train(run, notify=lambda note: None)
    evaluate_run(run.output, "val", notify=lambda note: None)
    return RunFolder(run.output)


@pytest.fixture(scope="module")
def expected(trained: RunFolder) -> list[Prediction]:
    rows = read_predictions(trained.predictions("val"))
    assert len({row.predicted for row in rows}) > 10, "answers differ"
    return rows


@pytest.fixture
def repo(trained: RunFolder, tmp_path: Path) -> Callable[..., Path]:
    """Writes a repository of the run, whose script finds model and adapter on this machine."""

    def write(challenge: str, *words: str | Path) -> Path:
        options = ("--repo", tmp_path / "repo", "--repo-id", NAME, "--base-model", BASE, *words)
        result = invoke("export", trained.folder, "--to", challenge, *options)
        assert result.exit_code == 0, result.output
        return tmp_path / "repo"

    return write


def replaced(code: str, *rules: tuple[str, str]) -> str:
    """A script of whose lines some are replaced, each exactly one; those without another are removed."""
    lines = code.splitlines()
    for line, other in rules:
        assert lines.count(line) == 1, line
        lines[lines.index(line)] = other
    return "\n".join(lines)


def as_dataset(records: list[Record]) -> datasets.Dataset:
    rows = [
        {
            "image": {"bytes": record.images[0].read_bytes(), "path": None},
            "img_id": record.images[0].stem,
            "question": record.turns[0].question,
            "answer": record.turns[0].answer,
        }
        for record in records
    ]
    features = {"image": datasets.Image(), **dict.fromkeys(("img_id", "question", "answer"), datasets.Value("string"))}
    return datasets.Dataset.from_list(rows, features=datasets.Features(features))


@pytest.fixture
def answers_of(sample: Path, trained: RunFolder, tmp_path: Path, monkeypatch) -> Callable[..., dict[str, Any]]:
    """Runs a script in a folder of its own; the Hub has the sample's validation rows. Gives what it wrote."""
    rows = as_dataset(read_records(sample / "val.jsonl"))
    known = {X1: {"test": rows}, PRIVATE_X1: {"test": rows}, GI: {"validation": rows}, PRIVATE_GI: {"test": rows}}

    def scored(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        assert references == [[answer] for answer in rows["answer"]] or len(set(map(str, references))) > 1
        share = sum(text in right for text, right in zip(predictions, references, strict=True)) / len(predictions)
        return dict.fromkeys(("bleu", "rouge1", "rouge2", "rougeL", "meteor"), share)

    def load_dataset(name: str, split: str | None = None) -> Any:
        return known[name][split] if split else known[name]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setitem(sys.modules, "evaluate", SimpleNamespace(load=lambda name: SimpleNamespace(compute=scored)))
    monkeypatch.chdir(tmp_path)

    def answer(code: str) -> dict[str, Any]:
        code = code.replace(BASE, str(sample / "model")).replace(NAME, str(trained.adapter))
        exec(compile(code, "submission_task1.py", "exec"), {"__name__": "__main__"})
        return json.loads((tmp_path / "predictions_1.json").read_text())

    return answer


FORM = 'val_dataset = load_dataset("SimulaMet/Kvasir-VQA-test", split="validation")'
ALL = ("val_dataset = ds_shuffled.select(range(1500))", "val_dataset = ds_shuffled")
EVALUATIONS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "medico, all rows": ("medico", (ALL,)),
    "medico, private rows": (
        "medico",
        (
            (f'ds = load_dataset("{X1}")["test"]', f'val_dataset = load_dataset("{PRIVATE_X1}")["test"]'),
            ("ds_shuffled = ds.shuffle(seed=42)", ""),
            (ALL[0], ""),
        ),
    ),
    "medvqa-gi, public rows": ("medvqa-gi", ()),
    "medvqa-gi, private rows": ("medvqa-gi", ((FORM, f'val_dataset = load_dataset("{PRIVATE_GI}", split="test")'),)),
}
"""What the organisers' tool replaces in a script before it runs it."""


@pytest.mark.guarantee(
    "An exported script gives the answers of `lookonce eval`, in float32, by stock transformers and PEFT."
)
@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_the_exported_script_answers_as_the_evaluation_did(evaluation, repo, answers_of, expected):
    challenge, rules = EVALUATIONS[evaluation]
    code = replaced((repo(challenge) / "submission_task1.py").read_text(), *rules)
    written = answers_of(code)
    order = list(range(len(expected)))
    if evaluation == "medico, all rows":
        order = datasets.Dataset.from_dict({"n": order}).shuffle(seed=42)["n"]
    rows = [expected[number] for number in order]
    texts = [row.predicted.strip() if challenge == "medico" else row.predicted for row in rows]
    assert [row["answer"] for row in written["predictions"]] == texts
    assert [row["question"] for row in written["predictions"]] == [row.question for row in rows]
    assert [(row["index"], row["img_id"]) for row in written["predictions"]] == [
        (number, Path(row.images[0]).stem) for number, row in enumerate(rows)
    ]
    right = sum(text == row.answer for text, row in zip(texts, rows, strict=True))
    assert written["public_scores"]["meteor"] == round(right / len(rows), 4 if challenge == "medico" else 2)
