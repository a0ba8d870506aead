"""Predicted, reference and no earlier answers side by side: figures by hand, seeds, what was not asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.answers import questions, wrong
from support.html_page import as_text, numbers_in, numbers_of

from lookonce.datasets.formats.record import Turn
from lookonce.eval.scores.prediction import Prediction
from lookonce.report.contexts import ContextScores, context_scores, other_contexts
from lookonce.report.report import Report
from lookonce.report.runs import open_runs

TITLE = "Earlier answers in the prompts: predicted, reference and none"
KNOWN = (Turn("before", "yes"),)


def staged(num_wrong: int, whose: str | None = None) -> list[Prediction]:
    """Answers to 60 questions, every second one of stage 2, with this many wrong ones among the first of these."""
    rows = [replace(row, stage=str(1 + place % 2)) for place, row in enumerate(questions())]
    context = {"context": KNOWN, "context_answers": whose} if whose else {}
    later = iter(wrong([replace(row, **context) for row in rows[1::2]], num_wrong))
    return [row if row.stage == "1" else next(later) for row in rows]


ANSWERS = {"reference": staged(3, "reference"), "none": staged(21)}


def scores(*folders: Path) -> list[ContextScores]:
    return context_scores(open_runs(folders))


def values(one: ContextScores, name: str) -> list[float]:
    return [round(found.value, 4) for found in (one.exact_match | one.differences)[name].values()]


@pytest.mark.guarantee(
    "Prompts with predicted, reference and no earlier answers are compared on the same questions; answers to "
    "other questions count as absent."
)
def test_shares_and_paired_differences_are_those_of_the_answers(make_folder):
    [one] = scores(make_folder("a", staged(9, "predicted"), beside=ANSWERS), make_folder("b", questions()))
    assert one.num_questions == {"all": 60, "stage 1": 30, "stage 2": 30} and not one.not_asked
    assert values(one, "predicted") == [0.85, 1.0, 0.7]
    assert (values(one, "reference"), values(one, "none")) == ([0.95, 1.0, 0.9], [0.65, 1.0, 0.3])
    assert (values(one, "predicted - none"), values(one, "reference - predicted")) == ([0.2, 0.0, 0.4], [0.1, 0.0, 0.2])
    low, high = one.exact_match["predicted"]["all"].interval
    assert (low, high) == open_runs([make_folder("c", staged(9, "predicted"))])[0].scores.overall.interval
    assert all(
        found.interval.low <= found.value <= found.interval.high
        for found in one.differences["predicted - none"].values()
    )


def test_seeds_are_one_and_a_difference_is_over_those_that_have_both(make_folder, tmp_path):
    first = make_folder("a", staged(9, "predicted"), 1, ANSWERS)
    second = make_folder("b", staged(15, "predicted"), 2, {"reference": staged(0, "reference")})
    [one] = scores(first, second)
    assert values(one, "predicted") == [0.8, 1.0, 0.6] and values(one, "reference") == [0.975, 1.0, 0.95]
    assert values(one, "predicted - none") == [0.2, 0.0, 0.4] and values(one, "reference - predicted") == [
        0.175,
        0.0,
        0.35,
    ]
    assert one.title == "a (2 seeds)"
    assert one.not_asked == [f"lookonce eval {tmp_path}/b --split val --no-context"]


@pytest.mark.parametrize("beside", [{}, {"reference": staged(3, "reference")[:30]}], ids=["nothing", "other questions"])
def test_what_is_absent_is_named_with_its_command(make_folder, tmp_path, beside):
    report = Report.of(open_runs([make_folder("a", staged(9, "predicted"), beside=beside)]))
    command = f"lookonce eval {tmp_path}/a --split val --reference-context --no-context"
    [one] = report.to_json()["contexts"]
    assert one["not_asked"] == [command] and list(one["exact_match"]) == ["predicted"] and not one["differences"]
    page = as_text(report.to_page())
    assert f"Not evaluated yet; run: {command}" in page and "not evaluated" in page.partition(TITLE)[2]


def test_a_result_with_true_answers_is_not_shown_as_own(make_folder):
    folder = make_folder("a", ANSWERS["reference"], beside={"none": ANSWERS["none"]})
    [one] = scores(folder)
    assert list(one.exact_match) == ["reference", "none"] and not one.differences
    assert scores(folder / "predictions" / "val-none.jsonl") == [], "a file that is named is not the result of a run"


def test_the_page_of_a_run_with_context_has_the_table_and_its_json_every_number(make_folder):
    report = Report.of(open_runs([make_folder("a", staged(9, "predicted"), beside=ANSWERS)]))
    page = report.to_page()
    assert TITLE in as_text(page)
    assert numbers_of(page) - numbers_in(json.loads(json.dumps(report.to_json()))) == set()
    without = Report.of(open_runs([make_folder("b", questions())]))
    assert TITLE not in as_text(without.to_page()) and "contexts" not in without.to_json()


@pytest.mark.parametrize(
    ("data", "whose", "kinds"),
    [
        ({"context": {"by": "stage", "order": [1, 2]}}, "predicted", ["reference", "none"]),
        ({"context": {"by": "stage", "order": [1, 2]}}, "reference", ["none"]),
        ({"context": {"by": "stage", "order": [1, 2]}, "val": []}, "predicted", []),
        ({}, "predicted", []),
    ],
)
def test_a_run_is_asked_beside_its_own_evaluation(make_run, data, whose, kinds: Sequence[str]):
    assert other_contexts(make_run(data=data, eval={"staged": whose})) == kinds
