"""The state of a run: what is done and what is missing, in every state that a run can be left in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.records import read_records, write_records
from lookonce.errors import RunFolderError
from lookonce.eval.run import evaluate_run
from lookonce.files import write_json
from lookonce.run.open import TO_BUILD, open_run
from lookonce.status import next_command


def nothing(site) -> None:
    pass


def planned(site) -> None:
    site.plan()


def cached(site) -> None:
    site.cache()


def half_cached(site) -> None:
    site.lose_a_shard()


def under_way(site) -> None:
    site.cache()
    site.begin()
    site.writes_progress()


def killed(site) -> None:
    site.cache()
    site.train("trained.json", "summary.json", "metrics", "predictions", "adapter")
    site.writes_progress(worker=replace(site.me, born=0.0))


def stopped(site) -> None:
    killed(site)
    site.writes_progress(end="stopped", reason="stopped by SIGUSR1 after step 1 of 2, which is saved; resume")


def failed_at_once(site) -> None:
    under_way(site)
    site.writes_progress(step=0, end="failed", reason="no memory")


def evaluating(site) -> None:
    site.cache()
    site.train("summary.json", "metrics")
    site.writes_progress(phase="evaluating")


def not_evaluated(site) -> None:
    site.cache()
    site.train("summary.json", "metrics")


def evaluated_by_hand(site) -> None:
    site.cache()
    site.train("summary.json")


def finished(site) -> None:
    site.finish()


def cache_gone_afterwards(site) -> None:
    site.train()


def a_question_changed_afterwards(site) -> None:
    finished(site)
    change_records(site)


def a_question_changed_before_training(site) -> None:
    site.cache()
    change_records(site)


def more_steps_afterwards(site) -> None:
    finished(site)
    site.run = site.run.model_copy(update={"train": site.run.train.model_copy(update={"steps": 9})})


def change_records(site) -> None:
    path = site.folder / "data" / "train.jsonl"
    path.write_text(path.read_text().replace("?", " now?", 1))


def an_image_came(site) -> None:
    site.cache()
    path = site.folder / "data" / "train.jsonl"
    first, *others = read_records(path)
    content = first.images[0].read_bytes()
    new = first.images[0].with_name("new.jpg")
    new.write_bytes(content + b"\0")
    write_records(site.folder / "data" / "more.jsonl", [replace(first, images=(new,)), first, *others])
    shutil.move(site.folder / "data" / "more.jsonl", path)


def an_image_was_edited(site) -> None:
    site.cache()
    path = sorted((site.folder / "data" / "images").iterdir())[0]
    path.write_bytes(path.read_bytes() + b"\0")


def an_image_is_lost(site) -> None:
    site.cache()
    sorted((site.folder / "data" / "images").iterdir())[0].unlink()


def a_shards_file_is_lost(site) -> None:
    site.cache()
    site.remove("shards/shard-00001.safetensors")


STATES: dict[Callable[[Any], None], tuple[list[str], str, list[str], str]] = {
    nothing: (["plan", "cache", "train", "eval"], "not begun", [], "cache build"),
    planned: (["cache 2", "train", "eval"], "not begun", [], "cache build"),
    half_cached: (["cache 1", "train", "eval"], "not begun", [], "cache build"),
    cached: (["train", "eval"], "not begun", [], "train run.yaml"),
    under_way: (["train", "eval"], "running", [], "watch -x -n 10 lookonce status run.yaml"),
    killed: (["train", "eval"], "dead", [], "train run.yaml --resume"),
    stopped: (["train", "eval"], "stopped", [], "train run.yaml --resume"),
    failed_at_once: (["train", "eval"], "failed", [], "train run.yaml"),
    evaluating: (["eval"], "running", [], "watch -x -n 10 lookonce status run.yaml"),
    not_evaluated: (["eval"], "trained", [], "train run.yaml --resume"),
    evaluated_by_hand: ([], "trained", [], "eval "),
    finished: ([], "finished", [], ""),
    cache_gone_afterwards: ([], "finished", [], ""),
    a_question_changed_before_training: (["train", "eval"], "not begun", [], "train run.yaml"),
    a_question_changed_afterwards: (
        ["train", "eval"],
        "another run",
        ["holds another run"],
        "train run.yaml --restart",
    ),
    more_steps_afterwards: (["train", "eval"], "another run", ["run.train.steps"], "train run.yaml --restart"),
    an_image_came: (["plan", "cache", "train", "eval"], "not begun", [], "cache build"),
    an_image_was_edited: (["plan", "cache", "train", "eval"], "not begun", [], "cache build"),
    an_image_is_lost: (["train", "eval"], "not begun", ["1 image cannot be read"], "train run.yaml"),
    a_shards_file_is_lost: (["train", "eval"], "not begun", ["1 finished shard"], "cache repair run.yaml"),
}


@pytest.mark.guarantee("`lookonce status` reports what a run still lacks, in every state in which a run can be left.")
@pytest.mark.parametrize(("prepare", "expected"), STATES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_missing_follows_from_the_files(site, monkeypatch, prepare, expected):
    missing, training, notes, command = expected
    monkeypatch.setattr("lookonce.status.shutil.which", lambda name: None)
    prepare(site)
    state = site.read()
    assert (state.missing(), state.training.state) == (missing, training)
    assert len(state.notes) == len(notes) and all(map(str.__contains__, state.notes, notes)), state.notes
    assert command in next_command(site.run, state, Path("run.yaml"), ())
    assert all(note in state.text() for note in state.notes)


def test_an_image_under_another_name_is_planned(site):
    site.cache()
    for path in (site.folder / "data" / "images").iterdir():
        path.rename(path.with_name(f"moved-{path.name}"))
    for split in ("train", "val", "test"):
        path = site.folder / "data" / f"{split}.jsonl"
        path.write_text(path.read_text().replace("frame-", "moved-frame-"))
    assert site.read().missing() == ["train", "eval"]


def test_without_a_plan_no_image_is_read(site, monkeypatch):
    def read(*arguments):
        raise AssertionError("read an image")

    monkeypatch.setattr("lookonce.datasets.images._read_file", read)
    state = site.read()
    assert state.missing()[0] == "plan"
    assert "the records name 66 image files" in state.text()


def test_an_image_that_cannot_be_encoded_is_reported_and_not_missing(site):
    path = sorted((site.folder / "data" / "images").iterdir())[0]
    path.write_bytes(b"no image")
    open_run(site.run, TO_BUILD).build()
    state = site.read()
    assert state.missing() == ["train", "eval"]
    [note] = state.notes
    assert "1 image could not be encoded" in note and "quarantine.jsonl" in note


def test_a_run_without_evaluation_records_is_done_when_it_is_trained(site):
    site.cache()
    site.run = site.run.model_copy(update={"data": site.run.data.model_copy(update={"val": []})})
    assert site.read().missing() == ["train"]


def test_what_status_wants_evaluated_is_what_eval_of_the_run_file_evaluates(site):
    """With a split that was added to the run file after the training."""
    finished(site)
    trained_with = json.loads((site.run.output / "run.json").read_text())
    trained_with["run"]["data"]["test"] = []
    write_json(site.run.output / "run.json", trained_with)
    site.run = site.run.model_copy(update={"eval": site.run.eval.model_copy(update={"split": "test"})})
    assert site.read().missing() == ["eval"]
    (site.folder / "run.yaml").write_text(site.run.to_yaml())
    evaluate_run(site.folder / "run.yaml")
    assert site.read().missing() == []


def test_eval_refuses_a_run_file_of_another_training(site):
    finished(site)
    changed = site.run.model_copy(update={"lora": site.run.lora.model_copy(update={"rank": 8})})
    (site.folder / "run.yaml").write_text(changed.to_yaml())
    with pytest.raises(RunFolderError, match=r"holds another run, which differs in\n  run.lora.rank"):
        evaluate_run(site.folder / "run.yaml")


def test_scores_stand_beside_the_majority_baseline_and_the_runs_split_is_first(site):
    finished(site)
    write_json(
        site.run.output / "metrics" / "a.json", {"overall": {"num_questions": 3, "exact_match": 1, "majority": 0}}
    )
    state = site.read()
    assert list(state.scores) == ["val", "a"]
    assert "a: 100.0% exact match on 3 questions; always the majority answer: 0.0%" in state.text()
