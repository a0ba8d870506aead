"""Numbers of single parts: cost, curves of an extended training, errors, settings, baselines."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.answers import questions, wrong
from support.html_page import as_text

from lookonce.eval.compare import compare
from lookonce.eval.join import read_runs
from lookonce.eval.scores.metrics import Evaluation
from lookonce.files import write_json
from lookonce.page import to_svg
from lookonce.report.report import Report
from lookonce.report.runs import open_runs
from lookonce.run.folder import RunFolder
from lookonce.status import find_scores


def made(*paths: Path) -> tuple[dict[str, Any], str]:
    """The numbers of a report, and the text of its page as a browser would show it."""
    report = Report.of(open_runs(paths))
    return report.to_json(), as_text(report.to_page())


def test_cost_has_gpu_hours_and_times_of_a_sample_and_a_question(make_folder):
    folder = make_folder("a", questions())
    numbers, words = made(folder)
    assert numbers["cost"]["a"]["gpu_hours"] == pytest.approx(33 / 3600)
    assert numbers["cost"]["a"]["ms_per_sample"] == pytest.approx(30e3 / 64)
    assert "50.0 ms a question" in words
    assert "tokens per second 10" in words


def test_exact_match_that_was_measured_while_training_is_drawn_and_named(make_folder):
    folder = make_folder("a", questions())
    log = RunFolder(folder).log
    assert "while training" not in made(folder)[1]
    shares = {2: 0.25, 4: 0.75, 6: float("nan"), 8: 0.5}
    lines = [json.dumps({"step": step, "eval_exact_match": share}) for step, share in shares.items()]
    log.write_text(log.read_text() + "\n".join(lines) + "\n")
    report = Report.of(open_runs([folder]))
    found = report.to_json()["curves"]["a"]
    assert found["exact_match_while_training"] == {2: 0.25, 4: 0.75, 8: 0.5}
    assert found["highest"] == (4, 0.75)
    assert "a: highest exact match while training 75.0% at step 4." in as_text(report.to_page())
    plot = to_svg(report.plots()["exact match while training"], "x")
    assert len(re.findall("<use [^>]*--line1", plot)) == 3


def test_errors_name_the_confusions_and_the_answers_to_closed_questions(make_folder):
    rows = [replace(row, predicted="no") if place < 10 else row for place, row in enumerate(questions())]
    errors = made(make_folder("a", rows), make_folder("b", questions(), seed=1))[0]["errors"]
    assert {(one["answer"], one["predicted"]) for one in errors["confusions"]} == {("yes", "no")}
    assert [one["times"] for one in errors["confusions"]] == [{"a": 1, "b": 0}] * 5
    yes = next(one for one in errors["closed"] if one["run"] == "a" and one["answer"] == "yes")
    assert (yes["yes"], yes["no"], yes["other"]) == (25, 5, 0)
    assert "No wrong answers." in made(make_folder("c", questions()))[1]


def test_settings_name_what_differs_between_runs_or_from_the_defaults(make_folder):
    one, other = make_folder("a", questions()), make_folder("b", questions(), seed=7)
    assert made(one, other)[0]["settings"]["differing"] == ["output", "train.seed"]
    alone = made(other)[0]["settings"]["differing"]
    assert {"train.seed", "lora.rank", "cache.shard_mb"} <= set(alone) and "train.optimizer" not in alone


def test_baselines_are_beside_the_run_also_by_group(make_folder):
    rows, folder = wrong(questions(), 6), RunFolder(make_folder("a", wrong(questions(), 6)))
    blind = wrong(rows, 40)
    write_json(
        folder.metrics("val"), Evaluation.of(rows, baselines={"shuffled": [row.predicted for row in blind]}).to_json()
    )
    write_json(folder.metrics("val-shuffled"), Evaluation.of(blind).to_json())
    numbers, words = made(folder.folder)
    assert "shuffled images 33.3% +56.7" in words
    assert "The model scores 33.3% with shuffled images, so it looks at the image" in words
    assert numbers["groups"]["a"]["by_source"]["source 0"]["baselines"] == {"shuffled": pytest.approx(1 / 3)}
    assert json.dumps(numbers["verdict"])
    assert "metric asked a majority shuffled images at most" in words
    assert re.search(r"F1 of words 60 90.0% \S+ 33.3%", words)


def test_the_metric_of_the_runs_is_what_the_page_and_the_comparison_are_about(make_folder):
    """Half of the words of each answer are right, and none is exactly; the other run has all."""
    half = [replace(row, answer=f"{row.answer} sir", predicted=f"{row.answer} ma") for row in questions()]
    full = [replace(row, predicted=row.answer) for row in half]
    folders = [make_folder(name, rows, metric="token_f1") for name, rows in (("a", half), ("b", full))]
    numbers, words = made(*folders)
    first, second = numbers["verdict"]["runs"]
    assert (first["metric"], first["score"], first["exact_match"], second["score"]) == ("token_f1", 0.5, 0.0, 1.0)
    assert first["majority"] == pytest.approx(1 / 3) and first["baselines"]["majority"]["difference"] == pytest.approx(
        1 / 6
    )
    assert first["sentence"].startswith("a scores 50.0% by F1 of words on 60 questions about 12 images (95% interval")
    [pair] = numbers["comparison"]["pairs"]
    assert (pair["metric"], pair["better"], pair["difference"]) == ("token_f1", "b", 0.5)
    assert "its F1 of words" in words and "b scores 50.0 points more F1 of words than a" in words
    lines = [
        json.dumps({"step": step, "eval_exact_match": 0, "eval_score": score}) for step, score in ((2, 0.25), (4, 0.5))
    ]
    RunFolder(folders[0]).log.write_text("\n".join(lines) + "\n" + RunFolder(folders[0]).log.read_text())
    assert "a: highest score by eval.metric while training 50.0% at step 4" in made(folders[0])[1]

    for paths in (folders, [folder / "predictions" / "val.jsonl" for folder in folders]):
        assert compare(read_runs(paths)).metric == "token_f1"
    by_other = Report.of(open_runs(folders), metric="exact_match").to_json()
    assert [run["score"] for run in by_other["verdict"]["runs"]] == [0, 1] and by_other["comparison"][
        "metric"
    ] == "exact_match"
    assert find_scores(RunFolder(folders[0]), "val")["val"].text() == "50.0% [44.2 to 55.8] F1 of words on 60 questions"


def test_a_training_by_rewards_is_drawn_by_its_rewards_and_not_by_its_loss(make_folder):
    paths = make_folder("a", questions(), drawn=["yes", "no", "no"]), make_folder("b", questions())
    numbers, found = made(*paths)
    first, second = numbers["curves"]["a"], numbers["curves"]["b"]
    assert first["loss"] == {} and first["validation_loss"] == {8: 0.25} and first["kl"][8] == 0.0625
    assert second["loss"] and "reward" not in second
    titles = {"loss", "mean reward", "share of mixed questions", "KL divergence to the model at the start"}
    assert titles <= Report.of(open_runs(paths)).plots().keys()
    rewards = {"num_questions": 56, "first": 0.0625, "last": 0.46875, "mixed_share": 0.5}
    assert rewards.items() <= numbers["cost"]["a"]["rewards"].items() and numbers["cost"]["b"]["rewards"] is None
    assert "60% sampling, 10% rewarding, 30% training" in found
    assert "a: mean reward 0.062 in the first fifth of the steps, 0.469 in the last; 50.0% of 56 questions" in found
    assert "no reward 0.12" in found and "step 8" in found
