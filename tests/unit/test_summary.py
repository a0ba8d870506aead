"""The end of a run: its summary, its report, and the questions that an evaluation has answered so far."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lookonce.workflow as workflow
from lookonce.datasets.records import Record, Turn
from lookonce.eval.answers.files import PartialAnswers
from lookonce.eval.decoding.dialogue import Answer
from lookonce.eval.scores.metric import Headline
from lookonce.eval.statistics import Interval
from lookonce.run.folder import RunFolder
from lookonce.run.log_file import Rewards
from lookonce.status import find_unfinished
from lookonce.summary import Summary

SUMMARY = Summary(
    run="runs/a",
    num_files=66,
    num_distinct=64,
    cache="caches/0123",
    cache_bytes=1_300_000,
    num_shards=1,
    encode_seconds=0.9,
    num_steps=10,
    first_step=0,
    num_samples=80,
    num_too_long=0,
    train_seconds=61.0,
    wait_share=0.028,
    split="val",
    num_questions=69,
    exact_match=0.884,
    majority=0.42,
    adapter="runs/a/adapter",
    next_command="lookonce eval runs/a",
    best_validation_loss=0.43210,
    best_validation_step=8,
    startup_seconds={"read records": 0.5, "load weights": 2.0},
)


def test_the_summary_has_one_line_per_figure():
    assert SUMMARY.text().strip().splitlines()[2:] == [
        "  images      66 files, 64 distinct",
        "  cache       1.3 MB of features in 1 shard, encoded once in 0.9 s",
        "              caches/0123",
        "  training    80 samples in 10 steps; 1 min 1 s, 2.8% of each step waiting for data",
        "              2.5 s before the first step, 2.0 s of them to load weights",
        "  val loss    lowest 0.4321, at step 8 of 10",
        "  validation  88.4% exact match on 69 questions; majority baseline (the most frequent training answer): 42.0%",
        "  adapter     runs/a/adapter",
        "  try next    lookonce eval runs/a",
    ]


def test_the_metric_that_counts_stands_before_exact_match_and_the_end_of_the_training_is_told():
    head = Headline("bleu", 60, 0.452, Interval(0.4, 0.5), 0.217)
    text = replace(SUMMARY, headline=head, ended_early="ended after step 10 of 40").text().splitlines()
    score = "45.2% [40.0 to 50.0] BLEU on 60 questions; majority baseline (the most frequent training answer): 21.7%"
    assert f"  validation  {score}; exact match 88.4%" in text and "              ended after step 10 of 40" in text


def test_a_training_by_rewards_tells_its_rewards_and_where_its_time_went():
    rewards = Rewards(96, 0.25, 0.5, 0.3, {"sampling": 6.0, "rewarding": 1.0, "training": 3.0})
    text = replace(SUMMARY, rewards=rewards).text().splitlines()
    mean = (
        "0.250 in the first fifth of the steps, 0.500 in the last; 30% of 96 questions drawn had answers of different"
    )
    assert f"  reward      {mean} rewards" in text
    assert "              time of the steps: 60% sampling, 10% rewarding, 30% training" in text
    assert any(line.startswith("  training    80 questions in 10 steps") for line in text)


def test_what_was_not_measured_is_left_out():
    unmeasured = {"best_validation_loss": None, "best_validation_step": None, "startup_seconds": {}}
    text = replace(SUMMARY, exact_match=None, majority=None, **unmeasured).text()
    assert not any(words in text for words in ("exact match", "val loss", "first step"))
    assert "3 records left out as too long" in replace(SUMMARY, num_too_long=3).text()
    assert "10 steps; 1 min 1 s since it was resumed at step 4" in replace(SUMMARY, first_step=4).text()


def test_a_summary_without_newer_keys_or_with_former_ones_is_read(tmp_path):
    newer = {"best_validation_loss", "best_validation_step", "startup_seconds"}
    older = {name: value for name, value in SUMMARY.to_json().items() if name not in newer}
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY.to_json() | {"ms_per_sample_plain": 3.0}))
    assert Summary.read(RunFolder(tmp_path)) == SUMMARY
    (tmp_path / "summary.json").write_text(json.dumps(older))
    assert Summary.read(RunFolder(tmp_path)).best_validation_loss is None


def test_a_report_that_cannot_be_written_is_a_note(make_run, tmp_path, monkeypatch):
    def fail(*arguments):
        raise MemoryError("no memory left")

    notes = []
    opened = SimpleNamespace(
        run=make_run(),
        records={"train": []},
        images=SimpleNamespace(key_of={}),
        folder=RunFolder(tmp_path / "run"),
        notify=notes.append,
    )
    monkeypatch.setattr(workflow, "report_training", fail)
    assert workflow._report(opened, SimpleNamespace(to_json=dict)) is None
    assert notes == [f"no report was written (no memory left); to try again: lookonce report {tmp_path / 'run'}"]


YES = Answer("yes", (1, 2), -0.5, "stop")


def test_answers_of_all_ranks_are_counted_beside_the_questions_of_the_split(tmp_path):
    stages = ("test", 0, [3]), ("test-stage-2", 0, [2])
    for name, rank, batches in (*stages, ("test", 1, [4]), ("val-untuned", 0, [1]), ("other", 0, [1])):
        with PartialAnswers(tmp_path / "predictions", name, "an evaluation", rank) as partial:
            for number, size in enumerate(batches):
                partial.add(10 * rank + number, [YES] * size)
    record = Record((Path("a"),), (Turn("Is there text?", "yes"),) * 2)
    found = find_unfinished(RunFolder(tmp_path), {"test": [record] * 8, "val": [record]})
    assert found == {"test": (9, 16), "val-untuned": (1, 2)}
    assert find_unfinished(RunFolder(tmp_path / "absent"), {"test": [record]}) == {}
