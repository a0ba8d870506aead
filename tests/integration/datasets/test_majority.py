"""The majority answer in context on real rows."""

from __future__ import annotations

import json
import random
import time
from statistics import mean

import pytest

from lookonce.datasets.majority import Majority, MajorityInContext
from lookonce.datasets.records import Record, Turn


def test_on_real_rows_it_knows_more_than_the_majority_and_is_quick(real_rows):
    """All questions about an image as one conversation in random order: hardly any was had before."""
    found: dict[str, list[Turn]] = {}
    for line in real_rows.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["image_filename"], []).append(Turn(row["question"], row["answer"]))
    draw = random.Random(0)
    records = [
        Record((), tuple(draw.sample(turns, len(turns)))) for turns in draw.sample([*found.values()], len(found))
    ]
    began, training, test = time.perf_counter(), records[:700], records[700:]
    plain, majority = Majority.of_records(training), MajorityInContext(training)
    asked = [(record.turns[:number], turn) for record in test for number, turn in enumerate(record.turns)]
    scores = [
        mean(majority.answer(before, turn.question) == turn.answer for before, turn in asked),
        mean(plain.answer(turn.question) == turn.answer for _, turn in asked),
    ]
    assert scores == pytest.approx([0.768, 0.647], abs=0.03)
    assert time.perf_counter() - began < 5  # 0.2 s on an idle machine
