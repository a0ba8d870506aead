"""Answers made by hand, an interruption while questions are answered, and run folders that look trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lookonce.eval.answers.files import PartialAnswers
from lookonce.eval.scores.prediction import Prediction
from lookonce.files import write_json
from lookonce.run.folder import ADAPTER_FILES, STATE, RunFolder, Trained, adapter_hashes
from lookonce.summary import Summary
from lookonce.train.loop.checkpoints import NEEDED, saving

NUM_IMAGES, ASKED = 12, 5


def questions(num_images: int = NUM_IMAGES) -> list[Prediction]:
    """Five questions about each image, all answered right."""
    return [
        Prediction(
            f"val.jsonl:{number}",
            (f"/gone/{number // ASKED}.jpg",),
            f"q{number % ASKED}",
            "yes" if number % 2 else "no",
            "yes" if number % 2 else "no",
            "no",
            image_keys=(f"key {number // ASKED}",),
            source=f"source {number % 2}",
            logprob=-0.1,
        )
        for number in range(num_images * ASKED)
    ]


def look_trained(folder: RunFolder, **figures: Any) -> None:
    """Write what a training writes when it ends; its adapter is what lies there."""
    folder.adapter.mkdir(exist_ok=True)
    for name in ADAPTER_FILES:
        (folder.adapter / name).touch()
    known: dict[str, Any] = {"num_steps": 4, "first_step": 0, "num_samples": 32, "num_too_long": 0, "seconds": 3.2}
    known |= {"wait_share": 0.01, "adapter": adapter_hashes(folder.adapter)}
    write_json(folder.trained, asdict(Trained(**known | figures)))


def write_checkpoint(folder: RunFolder, state: dict[str, Any]) -> Path:
    """Write a checkpoint whose files are whole, and empty but for Trainer's state."""
    checkpoint = folder.checkpoints / f"checkpoint-{state['global_step']}"
    with saving(checkpoint, 0):
        for name in NEEDED:
            (checkpoint / name).touch()
        write_json(checkpoint / STATE, state)
    return checkpoint


def look_finished(folder: RunFolder) -> None:
    """Write the summary of a run."""
    texts = {
        "run": "run",
        "cache": "caches/0",
        "split": "val",
        "adapter": "adapter",
        "next_command": "lookonce eval run",
    }
    numbers = dict.fromkeys(("num_files", "num_distinct", "num_shards", "num_questions", "first_step"), 0)
    figures = {"num_steps": 4, "num_samples": 32, "num_too_long": 0, "train_seconds": 3.2, "wait_share": 0.01}
    known = {"cache_bytes": 12_000, "encode_seconds": 4.0, "exact_match": None, "majority": None}
    write_json(folder.summary, Summary(**texts | numbers | figures | known).to_json())


def wrong(rows: Sequence[Prediction], number: int) -> list[Prediction]:
    """The first few answered wrong."""
    return [replace(row, predicted="perhaps") if place < number else row for place, row in enumerate(rows)]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, num_batches: int) -> list[int]:
    """Interrupt the program when this many batches are on disk; returns their numbers of questions."""
    added: list[int] = []
    real = PartialAnswers.add

    def add(self: PartialAnswers, batch: int, answers: Sequence[object]) -> None:
        if len(added) == num_batches:
            raise KeyboardInterrupt
        real(self, batch, answers)  # type: ignore[arg-type]
        added.append(len(answers))

    monkeypatch.setattr(PartialAnswers, "add", add)
    return added
