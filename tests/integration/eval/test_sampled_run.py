"""`lookonce eval --samples`: files, scores, interruption, and what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from support.answers import interrupt_after
from support.rows import run as command

from lookonce.datasets.records import Turn, read_records, write_records
from lookonce.errors import UsageError
from lookonce.eval.decoding.sampling import Sampling
from lookonce.eval.samples import sample_run
from lookonce.run.config import RunFile
from lookonce.workflow import train

WARM = Sampling(4, 1.3)


@pytest.fixture(scope="module")
def trained(make_run_in, sample, built, tmp_path_factory) -> RunFile:
    """A run that is right about as often as not, whose test split has several batches."""
    run = make_run_in(
        tmp_path_factory.mktemp("trained"),
        data={"val": [], "train": str(sample / "test.jsonl")},
        cache={"dir": str(built.folder.parent)},
        train={"steps": 30, "learning_rate": 0.01, "precision": "fp32"},
        eval={"max_new_tokens": 3, "tokens_per_batch": 600},
    )
    train(run, notify=lambda note: None)
    return run


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_are_those_of_the_rows_and_the_command_prints_them(trained):
    scores, path = sample_run(trained.output, WARM, "test", seed=5)
    rows = rows_of(path)
    assert path == trained.output / "samples" / "test.jsonl" and len(rows) == scores.num_questions == 87
    right = [[one["answer"].strip() == row["answer"].strip() for one in row["samples"]] for row in rows]
    assert all(len(each) == 4 for each in right) and [[one["right"] for one in row["samples"]] for row in rows] == right
    assert scores.best_of[1].value == pytest.approx(fmean(map(fmean, right)))
    assert scores.best_of[4].value == pytest.approx(fmean(map(any, right)))
    assert scores.mixed.value == pytest.approx(fmean(any(each) and not all(each) for each in right))
    assert 0.1 < scores.mixed.value < 0.9 and scores.mixed.interval
    written = json.loads(path.with_suffix(".json").read_text())
    assert written["sampling"] == {"num_samples": 4, "temperature": 1.3, "top_p": 1.0, "max_new_tokens": 3}
    before = path.read_bytes()
    words = ("eval", str(trained.output), "--split", "test", "--samples", "4", "--temperature", "1.3", "--seed", "5")
    assert json.loads(command(*words, "--json").stdout) == written and path.read_bytes() == before
    assert f"rewards differ in {scores.mixed.value:.1%} [" in command(*words).stdout
    assert not (trained.output / "predictions" / "test.jsonl").exists(), "the run's own answers are others"
    _, path = sample_run(trained.output, replace(WARM, num_samples=2), "test", seed=5)
    answers = [[[one["answer"] for one in row["samples"]][:2] for row in some] for some in (rows, rows_of(path))]
    assert answers[0] == answers[1], "fewer samples are the first of more"


@pytest.mark.guarantee("Samples of an evaluation that is interrupted are those of an uninterrupted one.")
def test_an_interrupted_command_continues_with_the_same_samples(trained, tmp_path, monkeypatch):
    folder = shutil.copytree(trained.output, tmp_path / "run")
    _, path = sample_run(folder, WARM, "test")
    before, scores, notes = path.read_bytes(), path.with_suffix(".json").read_bytes(), []
    path.unlink()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 2)
        sample_run(folder, WARM, "test")
    assert not path.exists() and [*path.parent.glob("*.partial-0.jsonl")]
    added = interrupt_after(monkeypatch, 99)
    sample_run(folder, WARM, "test", notify=notes.append)
    assert (path.read_bytes(), path.with_suffix(".json").read_bytes()) == (before, scores)
    assert any(note.startswith("continuing an evaluation: ") for note in notes) and 0 < sum(added) < 4 * 87
    assert not [*path.parent.glob("*.partial-*")]


def test_the_untuned_model_has_files_of_its_own(trained, tmp_path):
    folder = shutil.copytree(trained.output, tmp_path / "run")
    _, path = sample_run(folder, Sampling(2), "test", "untuned")
    assert path.name == "test-untuned.jsonl" and len(rows_of(path)) == 87


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--samples", "2", "--set", "eval.engine=generate"), "add --set eval.engine=shared"),
        (("--samples", "2", "--set", "eval.metric=bleu"), "is of all together; add --set eval.metric=rougeL"),
        (
            ("--samples", "2", "--set", "eval.metric=point_inside"),
            "applies to none of the questions of test; add",
        ),
        (("--samples", "2", "--baselines"), "--samples takes at most one baseline at a time"),
        (("--samples", "2", "--untuned", "--shuffle-images"), "--samples takes at most one baseline at a time"),
        (("--samples", "2", "--no-context"), "need `data.context` in the run file"),
        (("--top-p", "0.9"), "add --samples 8, or leave them out"),
        (("--temperature", "1"), "add --samples 8, or leave them out"),
        (("--samples", "1"), "2<=x<=1000"),
        (("--samples", "2", "--temperature", "1e-40"), "0.01<=x<=100"),  # logits would overflow
        (("--samples", "2", "--top-p", "1.1"), "0<x<=1"),
    ],
)
def test_what_samples_cannot_be_drawn_of_is_refused(trained, options, message):
    result = command("eval", str(trained.output), "--split", "test", *options)
    assert result.exit_code and message in result.stderr


def test_turns_that_follow_predicted_answers_are_refused_and_those_of_the_record_are_sampled(
    trained, sample, tmp_path, make_cached_run
):
    records = read_records(sample / "test.jsonl")[:4]
    twice = [replace(record, turns=(*record.turns, Turn("Is there text?", "no"))) for record in records]
    write_records(tmp_path / "turns.jsonl", twice, image_root=sample)
    run = make_cached_run(
        data={"test": str(tmp_path / "turns.jsonl"), "image_root": str(sample)}, train={"precision": "fp32"}
    )
    run_file = tmp_path / "run.yaml"
    run_file.write_text(run.to_yaml())
    with pytest.raises(UsageError, match="add --set eval.turns=reference"):
        sample_run(run_file, Sampling(2), "test", "untuned")
    scores, path = sample_run(run_file, Sampling(2), "test", "untuned", assignments=["eval.turns=reference"])
    assert scores.num_questions == 2 * len(records) and {row["turn"] for row in rows_of(path)} == {0, 1}
