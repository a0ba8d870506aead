"""The page and its JSON: text from data stays text, all numbers are in the JSON, and what is absent is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from support.answers import questions, wrong
from support.html_page import HOSTILE, Page, as_text, assert_harmless, numbers_in, numbers_of

from lookonce.files import write_json
from lookonce.report.report import Report
from lookonce.report.runs import open_runs
from lookonce.run.folder import RunFolder

TITLES = (
    *("Exact match", "Comparison", "Exact match by group", "Other metrics", "Curves", "Answers drawn while training"),
    *("Answers", "Errors", "Cost", "Settings", "Data and leaks", "Provenance and limits"),
)


def made(*paths: Path) -> tuple[Report, str]:
    report = Report.of(open_runs(paths))
    return report, report.to_page()


@pytest.mark.guarantee("No text of a record or of an answer becomes markup.")
def test_hostile_texts_stay_text_in_page_and_json(make_folder):
    hostile = [*(text.replace("\ud800", "") for text in HOSTILE), "\u202eright\u200f to left", "a\nb\tc", ""]
    rows = [
        replace(row, question=text, answer=f"{text}!", predicted=text, category=text, images=(f"/{text}",))
        for row, text in zip(questions(), hostile * 4, strict=False)
    ]
    report, text = made(make_folder("a<b>&", rows, drawn=hostile))
    page = assert_harmless(text)
    assert "<script>alert(1)</script>" in "".join(page.text)
    assert "\u202e" not in text and "\\u202eright\\u200f to left" in text
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["answers"][0]["shown"]


def test_every_part_has_its_section_and_its_key(make_folder):
    folders = make_folder("a", wrong(questions(), 9), drawn=["yes"]), make_folder("b", wrong(questions(), 30), seed=1)
    report, text = made(*folders)
    found = as_text(text)
    assert [title for title in TITLES if title not in found] == []
    assert report.to_page() == text, "the same runs give the same bytes"
    assert all(report.to_json().values()) and len(report.to_json()) == len(TITLES)


@pytest.mark.guarantee("Every number on the page of a report is in the JSON of the report.")
@pytest.mark.parametrize("names", ["a", "ab"])
def test_the_json_has_every_number_of_the_page(make_folder, names):
    drawn = {"a": ["yes", "no"], "b": []}
    report, text = made(
        *(make_folder(name, wrong(questions(), ord(name) - 80), ord(name), drawn=drawn[name]) for name in names)
    )
    known = numbers_in(json.loads(json.dumps(report.to_json())))
    found = numbers_of(text)
    assert len(found) > 60 and found - known == set()


def test_the_comparison_and_won_and_lost_answers_are_on_the_page_of_two_runs(make_folder):
    worse = [replace(row, predicted="perhaps") if place > 40 else row for place, row in enumerate(questions())]
    report, text = made(make_folder("a", wrong(questions(), 2)), make_folder("b", worse, seed=1))
    kinds = {kind["kind"]: kind["num_questions"] for kind in report.to_json()["answers"]}
    assert list(kinds.values()) == [0, 39, 2, 19]
    found = as_text(text)
    assert "Won by b: right there, wrong in a" in found and "are seeds of the same training" in found
    assert report.sentences() == [report.to_json()["comparison"]["pairs"][0]["sentence"]]


def test_48_thumbnails_take_less_than_3_megabytes_even_if_images_are_noise(make_folder, tmp_path):
    Image.merge("RGB", [Image.effect_noise((600, 600), 120) for _ in range(3)]).save(tmp_path / "noise.png")
    rows = [replace(row, images=(str(tmp_path / "noise.png"),)) for row in questions()]
    _, text = made(make_folder("a", rows))
    assert len(Page(text).urls()) == 48 and len(text.encode()) < 3_000_000


def test_a_missing_and_a_broken_image_are_named_so(make_folder, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    images = [("/gone/0.jpg",), (str(tmp_path / "broken.jpg"),), ()]
    rows = [replace(row, images=images[place % 3]) for place, row in enumerate(questions())]
    found = as_text(made(make_folder("a", rows))[1])
    assert all(words in found for words in ("image not found", "image cannot be read", "no image"))


def test_an_unfinished_run_has_a_page_without_scores(make_folder):
    report, text = made(make_folder("a"))
    found = as_text(text)
    assert "a is not evaluated on val; its training: " in found
    assert 'aria-label="loss of a"' in text and report.to_json()["curves"]["a"]["loss"]
    both = made(make_folder("a"), make_folder("b", questions()))[0]
    assert both.to_json()["comparison"] is None and "not evaluated" in as_text(both.to_page())


def test_nan_and_one_image_are_no_obstacle(make_folder, tmp_path):
    rows = [json.loads(json.dumps(row.to_json())) for row in questions(1)]
    for row in rows:
        del row["source"]
        row["logprob"] = float("nan")
    folder = make_folder("a", questions())
    overall = {"num_questions": 5, "exact_match": 1.0, "majority": 0.5}
    write_json(RunFolder(folder).metrics("val"), {"overall": overall})  # as earlier versions wrote it
    RunFolder(folder).predictions("val").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with RunFolder(folder).log.open("a") as file:
        file.write('{"step": 9, "loss": NaN, "eval_loss": NaN}\n')
    report, text = made(folder)
    found = as_text(text)
    assert "all questions are about fewer than 5 images, so there is no interval" in found and "no interval" in found
    assert "NaN" not in text
    assert json.dumps(report.to_json(), allow_nan=False)


def test_a_predictions_file_outside_a_run_folder_has_scores_and_nothing_else(make_folder, tmp_path):
    file = tmp_path / "answers.jsonl"
    RunFolder(make_folder("a", wrong(questions(), 5))).predictions("val").rename(file)
    value = made(file)[0].to_json()
    assert value["verdict"]["runs"][0]["exact_match"] == pytest.approx(55 / 60)
    assert (value["settings"], value["data"], value["curves"]) == (None, None, None)
