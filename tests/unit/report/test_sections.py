"""Numbers of single parts: cost, curves of an extended training, errors, settings, baselines."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from support.answers import look_trained, questions, wrong
from support.html_page import Page

from lookonce.eval.scores.metrics import Evaluation
from lookonce.files import write_json
from lookonce.report.answers import errors
from lookonce.report.provenance import settings
from lookonce.report.runs import open_runs
from lookonce.report.scores import groups, metrics, verdict
from lookonce.report.training import cost, curves
from lookonce.run.folder import RunFolder


def words(part) -> str:
    """The text of a part, as a browser would show it."""
    from lookonce.page import page

    return " ".join("".join(f"{text} " for text in Page(page("t", part.elements(), "")).text).split())


def test_cost_has_gpu_hours_and_the_measured_speed_beside_plain_training(make_folder):
    folder = make_folder("a", questions())
    ways = [{"way": "plain", "ms_per_sample": 10.0}, {"way": "shared", "ms_per_sample": 2.5}]
    write_json(folder / "bench.json", {"ways": ways})
    part = cost(open_runs([folder]))
    assert part.numbers["a"]["gpu_hours"] == pytest.approx(33 / 3600)
    assert part.numbers["a"]["ms_per_sample"] == pytest.approx(30e3 / 64)
    assert "shared 4.0 times faster than plain" in words(part) and "50.0 ms a question" in words(part)
    assert "tokens per second 10" in words(part)


def test_an_extended_training_has_the_exact_match_of_each_length(make_folder):
    folder = make_folder("a", wrong(questions(), 6))
    (folder / "steps-4").mkdir()
    look_trained(RunFolder(folder / "steps-4"), num_steps=4)
    overall = {"num_questions": 4, "exact_match": 0.5, "majority": 0.25}
    write_json(folder / "steps-4" / "metrics" / "val.json", {"overall": overall})
    part = curves(open_runs([folder]))
    assert part.numbers["a"]["exact_match"] == {4: 0.5, 8: 0.9} and "exact match" in words(part)


def test_exact_match_that_was_measured_while_training_is_drawn_and_named(make_folder):
    folder = make_folder("a", questions())
    log = RunFolder(folder).log
    assert "while training" not in words(curves(open_runs([folder])))
    shares = {2: 0.25, 4: 0.75, 6: float("nan"), 8: 0.5}
    lines = [json.dumps({"step": step, "eval_exact_match": share}) for step, share in shares.items()]
    log.write_text(log.read_text() + "\n".join(lines) + "\n")
    part = curves(open_runs([folder]))
    assert part.numbers["a"]["exact_match_while_training"] == {2: 0.25, 4: 0.75, 8: 0.5}
    assert part.numbers["a"]["most_right"] == (4, 0.75)
    assert "a: highest exact match while training 75.0% at step 4." in words(part)
    circles = [one for one in part.content[1].iter("circle") if "marked" in one.get("class", "")]
    assert len(circles) == len(shares)  # one of them is the only validation loss


def test_errors_name_the_confusions_and_the_answers_to_closed_questions(make_folder):
    rows = [replace(row, predicted="no") if place < 10 else row for place, row in enumerate(questions())]
    part = errors(open_runs([make_folder("a", rows), make_folder("b", questions(), seed=1)]))
    assert {(one["answer"], one["predicted"]) for one in part.numbers["confusions"]} == {("yes", "no")}
    assert [one["times"] for one in part.numbers["confusions"]] == [{"a": 1, "b": 0}] * 5
    yes = next(one for one in part.numbers["closed"] if one["run"] == "a" and one["answer"] == "yes")
    assert (yes["yes"], yes["no"], yes["other"]) == (25, 5, 0)
    assert errors(open_runs([make_folder("c", questions())])).text == "No wrong answers."


def test_settings_name_what_differs_between_runs_or_from_the_defaults(make_folder):
    one, other = make_folder("a", questions()), make_folder("b", questions(), seed=7)
    assert settings(open_runs([one, other])).numbers["differing"] == ["output", "train.seed"]
    alone = settings(open_runs([other])).numbers["differing"]
    assert {"train.seed", "lora.rank", "cache.shard_mb"} <= set(alone) and "train.optimizer" not in alone


def test_baselines_are_beside_the_run_also_by_group(make_folder):
    rows, folder = wrong(questions(), 6), RunFolder(make_folder("a", wrong(questions(), 6)))
    blind = wrong(rows, 40)
    write_json(
        folder.metrics("val"),
        Evaluation.of(rows, baselines={"shuffled": [row.predicted for row in blind]}).to_json(),
    )
    write_json(folder.metrics("val-shuffled"), Evaluation.of(blind).to_json())
    runs = open_runs([folder.folder])
    assert "shuffled images 33.3% +56.7" in words(verdict(runs))
    assert "The model scores 33.3% with shuffled images, so it looks at the image" in words(verdict(runs))
    assert groups(runs).numbers["a"]["by_source"]["source 0"]["baselines"] == {"shuffled": pytest.approx(1 / 3)}
    assert json.dumps(verdict(runs).numbers)
    assert "metric asked a majority shuffled images at most" in words(metrics(runs))
    assert re.search(r"F1 of words 60 90.0% \S+ 33.3%", words(metrics(runs)))
