"""A script of `lookonce export --repo`, run as the organisers of a challenge run it, without the Hub."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from lookonce.datasets.records import Record

NAME, BASE = "owner/adapter", "base-owner/base-model"
"""The repository, and the base model."""
X1, PRIVATE_X1 = "SimulaMet/Kvasir-VQA-x1", "SimulaMet/Kvasir-VQA-x1-private"
GI, PRIVATE_GI = "SimulaMet/Kvasir-VQA-test", "SimulaMet/Kvasir-VQA-private"
ALL_ROWS = ("val_dataset = ds_shuffled.select(range(1500))", "val_dataset = ds_shuffled")
PRIVATE_ROWS = (
    (f'ds = load_dataset("{X1}")["test"]', f'val_dataset = load_dataset("{PRIVATE_X1}")["test"]'),
    ("ds_shuffled = ds.shuffle(seed=42)", ""),
    (ALL_ROWS[0], ""),
)
PRIVATE_GI_ROWS = (
    f'val_dataset = load_dataset("{GI}", split="validation")',
    f'val_dataset = load_dataset("{PRIVATE_GI}", split="test")',
)
"""Lines that the organisers' tool replaces, and by what: for all rows of Medico, and for the private rows of each."""


def replaced(code: str, *rules: tuple[str, str]) -> str:
    """A script of whose lines some are replaced, each exactly one."""
    lines = code.splitlines()
    for line, other in rules:
        assert lines.count(line) == 1, line
        lines[lines.index(line)] = other
    return "\n".join(lines)


def scored(predictions: list[str], references: list[list[str]]) -> dict[str, float]:
    """In place of each score, the share of right answers."""
    share = sum(text in right for text, right in zip(predictions, references, strict=True)) / len(predictions)
    return dict.fromkeys(("bleu", "rouge1", "rouge2", "rougeL", "meteor"), share)


def as_dataset(records: Sequence[Record]) -> datasets.Dataset:
    """Rows as the challenges publish them."""
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


def run_script(
    code: str, records: Sequence[Record], model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> dict[str, Any]:
    """Run a script in a folder and give what it wrote; the records are the rows of all datasets on the Hub."""
    rows = as_dataset(records)
    known = {X1: {"test": rows}, PRIVATE_X1: {"test": rows}, GI: {"validation": rows}, PRIVATE_GI: {"test": rows}}
    load = lambda name, split=None: known[name][split] if split else known[name]  # noqa: E731
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setitem(sys.modules, "evaluate", SimpleNamespace(load=lambda name: SimpleNamespace(compute=scored)))
    monkeypatch.chdir(folder)
    code = code.replace(BASE, str(model)).replace(NAME, str(adapter))
    exec(compile(code, "submission_task1.py", "exec"), {"__name__": "__main__"})
    written: dict[str, Any] = json.loads((folder / "predictions_1.json").read_text())
    return written
