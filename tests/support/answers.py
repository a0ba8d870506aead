"""Answers made by hand, five questions about each of some images; and an interruption while questions are answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lookonce.eval.answers.partial import PartialAnswers
from lookonce.eval.scores.prediction import Prediction

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
