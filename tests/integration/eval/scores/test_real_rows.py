"""All metrics on published validation rows of Kvasir-VQA, with a predictor of known accuracy.

The rows are those of every second image, which halves the time.
The expected values are those of another split of the same set (975 images, 8,984 questions), computed with the
challenge's libraries: the majority answer scores EM .648, BLEU .680, ROUGE-1 .683, ROUGE-2 .119, ROUGE-L .681, METEOR
.399; the references themselves score ROUGE-2 .256 and METEOR .609. Two splits of one set differ by a digit at most.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from lookonce.datasets.balance import Majority
from lookonce.eval.scores import match
from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.scores.prediction import Prediction

pytestmark = pytest.mark.guarantee("Metrics have the values of their published definitions, also on real answers.")

A_DIGIT = 0.01
ACCURACY = 0.924
MAX_SECONDS = 15
"""Ten times what it takes on an idle machine."""


@pytest.fixture(scope="module")
def rows(real_rows):
    found = [json.loads(line) for line in real_rows.read_text().splitlines()]
    images = set(list(dict.fromkeys(row["image_filename"] for row in found))[::2])
    return [row for row in found if row["image_filename"] in images]


def simulated(rows: list[dict[str, Any]]) -> list[Prediction]:
    """Predictions that are right on a known share of the questions."""
    draw, answers = random.Random(0), {}
    for row in rows:
        answers.setdefault(row["question"], []).append(row["answer"])
    majority = Majority((row["question"], row["answer"]) for row in rows)
    is_right = [number < round(ACCURACY * len(rows)) for number in range(len(rows))]
    draw.shuffle(is_right)

    def answer(row: dict[str, Any], right: bool) -> str:
        if right:
            return row["answer"]
        return draw.choice([text for text in answers[row["question"]] if text != row["answer"]] or ["?"])

    return [
        Prediction(
            origin="val.jsonl",
            images=(row["image_filename"],),
            question=row["question"],
            answer=row["answer"],
            predicted=answer(row, right),
            majority=majority.answer(row["question"]),
            stage=str(row["stage"]),
        )
        for row, right in zip(rows, is_right, strict=True)
    ]


@pytest.fixture(scope="module")
def evaluation(rows) -> Evaluation:
    predictions, began = simulated(rows), time.perf_counter()
    found = Evaluation.of(predictions)
    assert time.perf_counter() - began < MAX_SECONDS
    return found


def test_exact_match_is_the_known_accuracy_beside_the_majority(evaluation):
    assert evaluation.overall.exact_match == pytest.approx(ACCURACY, abs=1e-4)
    assert evaluation.overall.majority == pytest.approx(0.648, abs=A_DIGIT)
    assert evaluation.figures["lenient"].majority == pytest.approx(0.698, abs=A_DIGIT)


@pytest.mark.skipif(not match.has_text_metrics(), reason=f"the extra `metrics` is {match.NOT_INSTALLED}")
def test_the_text_metrics_of_the_split_are_the_same_to_four_digits(real_rows):
    """Without METEOR's synonyms, which change nothing here; of all rows, each with its question's majority answer."""
    rows = [json.loads(line) for line in real_rows.read_text().splitlines()]
    majority, scores = (
        Majority((row["question"], row["answer"]) for row in rows),
        match.TextMetrics([(row["answer"],) for row in rows]),
    )
    guessed, perfect = (
        scores.scores([majority.answer(row["question"]) for row in rows]),
        scores.scores([row["answer"] for row in rows]),
    )
    expected = {"bleu": 0.6875, "rouge1": 0.6815, "rouge2": 0.1211, "rougeL": 0.6790, "meteor": 0.3990}
    assert {key: round(guessed[key], 4) for key in expected} == expected
    assert (round(perfect["rouge2"], 4), round(perfect["meteor"], 4)) == (0.2590, 0.6115)


@pytest.mark.skipif(not match.has_text_metrics(), reason=f"the extra `metrics` is {match.NOT_INSTALLED}")
@pytest.mark.parametrize(
    ("key", "majority", "model", "perfect"),
    [
        ("bleu", 0.680, 0.931, 1),
        ("rouge1", 0.683, 0.934, 1),
        ("rouge2", 0.119, 0.233, 0.256),
        ("rougeL", 0.681, 0.930, 1),
        ("meteor", 0.399, 0.566, 0.609),
    ],
)
def test_the_text_metrics_have_the_published_values(evaluation, key, majority, model, perfect):
    figure = evaluation.figures[key]
    assert figure.majority == pytest.approx(majority, abs=A_DIGIT)
    assert figure.model == pytest.approx(model, abs=A_DIGIT)
    assert figure.perfect == pytest.approx(perfect, abs=A_DIGIT)
