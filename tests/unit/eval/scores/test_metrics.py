"""The evaluation: exact match beside its baselines, by group, and all other figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lookonce.datasets.records import Turn
from lookonce.eval.scores import match
from lookonce.eval.scores.metrics import BASELINES, IN_CONTEXT, NAMES, Evaluation, headline, read_metrics
from lookonce.eval.scores.prediction import Prediction
from lookonce.run.folder import RunFolder


def prediction(answer: str, predicted: str, majority: str = "no", question: str = "q") -> Prediction:
    return Prediction("here:1", ("a.jpg",), question, answer, predicted, majority)


@pytest.mark.parametrize(("predicted", "right"), [(" paris is ", True), ("paris ip; paris is", False)])
def test_any_of_several_references_is_right_and_nothing_between_them(predicted, right):
    one = Prediction("here:1", "a.jpg", "q", "paris ip", predicted, predicted, ("paris ip", "paris is"))
    assert (one.is_right, one.is_majority_right) == (right, right)
    assert one.to_json()["references"] == ("paris ip", "paris is")
    assert "references" not in prediction("paris ip", predicted).to_json()


def test_scores_are_shares_overall_and_by_question():
    evaluation = Evaluation.of(
        [
            prediction("yes", "yes"),
            prediction("no", "yes"),
            prediction("2", "2", "1", "how many"),
            prediction("no", "no"),
        ]
    )
    assert evaluation.overall.num_questions == 4
    assert evaluation.overall.exact_match == 3 / 4
    assert evaluation.overall.majority == 2 / 4
    assert evaluation.groups["question"]["q"].exact_match == 2 / 3
    assert evaluation.groups["question"]["how many"].majority == 0
    assert evaluation.to_json()["by_question"]["q"]["num_questions"] == 3


def test_the_report_has_one_line_per_question_and_one_for_all():
    text = Evaluation.of([prediction("yes", "yes"), prediction("2", "1", "2", "how many")]).text()
    lines = text.split("\n\n")[0].splitlines()
    assert len(lines) == 5
    assert lines[-2].split() == ["all", "2", "50.0%", "50.0%"] and lines[-1].startswith("  majority: always")
    assert "interval  none, because the questions are about fewer than 5 images" in text


def test_the_other_metrics_of_baselines_stand_beside_those_of_the_model():
    rows = [prediction("yes", "yes"), prediction("2", "1", "2", "how many")]
    untuned = Evaluation.of([prediction("yes", "yes"), prediction("2", "2", "2", "how many")]).to_json()
    text = Evaluation.of(rows).text({"untuned": untuned, "shuffled": {}})
    header, first = text[text.index("other metrics") :].splitlines()[:2]
    assert header.split() == ["other", "metrics", "asked", "model", "majority", "untuned", "shuffled", "at", "most"]
    assert first.split() == [*"mean over question texts 2 50.0% 50.0% 100.0%".split()]


ANSWERED = [
    Prediction(
        "val.jsonl:1",
        ("a.jpg",),
        "What color is the abnormality? If more than one separate with ;",
        "pink; red",
        "red; pink",
        "pink",
        source="polyps",
        ended="stop",
    )
] * 2


def test_the_report_fits_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setattr("lookonce.text.terminal_width", lambda: 80)
    text = Evaluation.of([*ANSWERED, prediction("(1, 2)", "?")], {"q": {"no"}}).text()
    assert max(map(len, text.splitlines())) <= 80
    assert "0.7 sim" in text and "1 different" not in text.splitlines()[0]
    assert "labels in any order" in text


def test_the_keys_of_the_file_are_the_documented_ones(root):
    page = (root / "docs" / "metrics.md").read_text()
    value = Evaluation.of([*ANSWERED, prediction("(1, 2)", "?"), prediction("[1, 2, 3, 4]", "?")]).to_json()
    assert value["overall"] == {"num_questions": 4, "exact_match": 0, "majority": 0}
    headline = {"overall", "headline", "exact_match_interval", "baselines"}
    groups = {"by_question", "by_category", "by_source", "by_stage"}
    assert value.keys() == {*headline, *groups, "metrics", "counts", "text_metrics"}
    assert value["metrics"]["label_set_match"] == {
        "name": "labels in any order",
        "num_questions": 2,
        "model": 1,
        "majority": 0,
    }
    parts = (value[name] for name in ("overall", "headline", "metrics", "counts"))
    keys = [*value, *NAMES, *value["baselines"]["majority"], *(key for part in parts for key in part)]
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_without_the_extra_the_report_says_what_to_install(monkeypatch):
    monkeypatch.setattr(match, "has_text_metrics", lambda: False)
    evaluation = Evaluation.of(ANSWERED)
    assert "not installed: pip install 'lookonce[metrics]'" in evaluation.text()
    assert "bleu" not in evaluation.to_json()["metrics"] and evaluation.to_json()["text_metrics"].startswith("not")


NUM_QUESTIONS = 40
PLAIN = Prediction("val.jsonl:1", ("a.jpg",), "q", "yes", "yes", "no")
ROWS = [
    replace(PLAIN, predicted="yes" if number % 4 else "no", image_keys=(str(number),))
    for number in range(NUM_QUESTIONS)
]
"""Questions about an image each, of which three quarters are answered right, and none by the majority."""


def test_a_baseline_is_compared_question_by_question():
    half = ["yes" if number % 4 > 1 else "no" for number in range(NUM_QUESTIONS)]
    head, baselines = headline(ROWS, {"untuned": half, "shuffled": [row.predicted for row in ROWS]})
    majority, untuned, same = (baselines[name] for name in ("majority", "untuned", "shuffled"))
    assert (majority.exact_match, majority.difference) == (0.0, 0.75)
    assert head.interval == (pytest.approx(0.6, abs=0.02), pytest.approx(0.86, abs=0.02))
    assert majority.interval == (pytest.approx(0.57, abs=0.02), pytest.approx(0.86, abs=0.02))
    assert (untuned.exact_match, untuned.difference) == (0.5, 0.25)
    assert 0.1 < untuned.interval.low < 0.25 < untuned.interval.high < 0.41  # 0.05 to 0.45 if not in pairs
    assert (same.exact_match, same.difference) == (0.75, 0.0)
    assert 0 < same.interval.high < 0.1  # the same answers are no certainty


def test_a_baseline_of_an_earlier_version_is_not_read(tmp_path):
    folder = RunFolder(tmp_path)
    value = Evaluation.of(ROWS).to_json()
    value["baselines"]["majority_in_context"] = value["baselines"]["majority"]
    folder.metrics("test").parent.mkdir(parents=True)
    folder.metrics("test").write_text(json.dumps(value))
    assert read_metrics(folder, "test")["baselines"].keys() == {"majority"}


def test_the_table_of_all_baselines_fits_80_columns():
    row = replace(ROWS[0], turn=1, earlier=(Turn("p", "no"),))
    answers = {name: ["yes"] * NUM_QUESTIONS for name in (*BASELINES, *IN_CONTEXT)}
    block = Evaluation.of([row, *ROWS[1:]], baselines=answers).text().split("\n\n")[1].splitlines()
    assert [line.split("  ")[0] for line in block[1:]] == [NAMES[name] for name in ("majority", *answers)]
    assert max(map(len, block)) <= 80
    assert block[-1].split()[:4] == ["no", "context", "100.0%", "-25.0"]
