"""The state of a run: what is done and what is missing, in every state that a run can be left in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lookonce.cli import main
from lookonce.datasets.records import read_records, write_records
from lookonce.errors import RunFolderError
from lookonce.eval.answers.files import PartialAnswers
from lookonce.eval.run import evaluate_run
from lookonce.files import write_json
from lookonce.run.open import TO_BUILD, open_run
from lookonce.status import next_command


def killed(site, **said: Any) -> None:
    site.cache()
    site.train("trained.json", "summary.json", "metrics", "predictions", "adapter")
    site.writes_progress(**said or {"worker": replace(site.me, born=0.0)})


def under_way(site, **said: Any) -> None:
    site.cache()
    site.begin()
    site.writes_progress(**said)


def trained(site, *lacks: str, **said: Any) -> None:
    site.cache()
    site.train("summary.json", *lacks)
    if said:
        site.writes_progress(**said)


def more_steps_afterwards(site) -> None:
    site.finish()
    site.run = site.run.model_copy(update={"train": site.run.train.model_copy(update={"steps": 9})})


def a_question_changed_after(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
    def change(site) -> None:
        prepare(site)
        path = site.folder / "data" / "train.jsonl"
        path.write_text(path.read_text().replace("?", " now?", 1))

    return change


def an_image_came(site) -> None:
    site.cache()
    path = site.folder / "data" / "train.jsonl"
    first, *others = read_records(path)
    new = first.images[0].with_name("new.jpg")
    new.write_bytes(first.images[0].read_bytes() + b"\0")
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


def another_split_is_begun(site) -> None:
    site.finish()
    with PartialAnswers(site.run.output / "predictions", "test", "an evaluation", 0):
        pass


STOPPED = {"end": "stopped", "reason": "stopped by SIGUSR1 after step 1 of 2, which is saved; resume"}
ALL, UNTRAINED = ["plan", "cache", "train", "eval"], ["train", "eval"]
WATCH, RESTART = "watch -x -n 10 lookonce status run.yaml", "train run.yaml --restart"
STATES: dict[str, tuple[Callable[[Any], None], list[str], str, list[str], str]] = {
    "nothing": (lambda site: None, ALL, "not begun", [], "cache build"),
    "planned": (lambda site: site.plan(), ["cache 2", *UNTRAINED], "not begun", [], "cache build"),
    "half cached": (lambda site: site.lose_a_shard(), ["cache 1", *UNTRAINED], "not begun", [], "cache build"),
    "cached": (lambda site: site.cache(), UNTRAINED, "not begun", [], "train run.yaml"),
    "under way": (under_way, UNTRAINED, "running", [], WATCH),
    "killed": (killed, UNTRAINED, "dead", [], "train run.yaml --resume"),
    "stopped": (lambda site: killed(site, **STOPPED), UNTRAINED, "stopped", [], "train run.yaml --resume"),
    "failed": (lambda site: under_way(site, step=0, end="failed"), UNTRAINED, "failed", [], "train run.yaml"),
    "evaluating": (lambda site: trained(site, "metrics", phase="evaluating"), ["eval"], "running", [], WATCH),
    "not evaluated": (lambda site: trained(site, "metrics"), ["eval"], "trained", [], "train run.yaml --resume"),
    "evaluated by hand": (trained, [], "trained", [], "eval "),
    "finished": (lambda site: site.finish(), [], "finished", [], ""),
    "another split is begun": (another_split_is_begun, [], "finished", [], "--split test"),
    "without its cache": (lambda site: site.train(), [], "finished", [], ""),
    "changed before": (a_question_changed_after(lambda site: site.cache()), UNTRAINED, "not begun", [], "train run"),
    "changed afterwards": (
        *(a_question_changed_after(lambda site: site.finish()), UNTRAINED),
        *("another run", ["holds another run"], RESTART),
    ),
    "more steps": (more_steps_afterwards, UNTRAINED, "another run", ["run.train.steps"], RESTART),
    "an image came": (an_image_came, ALL, "not begun", [], "cache build"),
    "an image was edited": (an_image_was_edited, ALL, "not begun", [], "cache build"),
    "an image is lost": (an_image_is_lost, UNTRAINED, "not begun", ["1 image cannot be read"], "train run.yaml"),
    "a shard is lost": (a_shards_file_is_lost, UNTRAINED, "not begun", ["1 finished shard"], "cache repair run.yaml"),
}


@pytest.mark.guarantee("`lookonce status` reports what a run still lacks, in every state in which a run can be left.")
@pytest.mark.parametrize(("prepare", "missing", "training", "notes", "command"), STATES.values(), ids=STATES)
def test_what_is_missing_follows_from_the_files(site, monkeypatch, prepare, missing, training, notes, command):
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
    site.finish()
    trained_with = json.loads((site.run.output / "run.json").read_text())
    trained_with["run"]["data"]["test"] = []
    write_json(site.run.output / "run.json", trained_with)
    site.run = site.run.model_copy(update={"eval": site.run.eval.model_copy(update={"split": "test"})})
    assert site.read().missing() == ["eval"]
    (site.folder / "run.yaml").write_text(site.run.to_yaml())
    evaluate_run(site.folder / "run.yaml")
    assert site.read().missing() == []


def test_a_moved_run_folder_is_continued_where_it_is(site):
    killed(site)
    moved = site.run.output.rename(site.run.output.with_name("moved"))
    found = json.loads(CliRunner().invoke(main, ["status", str(moved), "--json"]).stdout)
    assert found["training"]["step"] >= int(found["training"]["checkpoint"].partition("-")[2])
    assert found["next_command"].endswith(f"train {moved}/run.yaml --set output={moved} --resume")


def test_eval_refuses_a_run_file_of_another_training(site):
    site.finish()
    changed = site.run.model_copy(update={"lora": site.run.lora.model_copy(update={"rank": 8})})
    (site.folder / "run.yaml").write_text(changed.to_yaml())
    with pytest.raises(RunFolderError, match=r"holds another run, which differs in\n  run.lora.rank"):
        evaluate_run(site.folder / "run.yaml")


def test_scores_stand_beside_the_majority_baseline_and_the_runs_split_is_first(site):
    site.finish()
    write_json(
        site.run.output / "metrics" / "a.json", {"overall": {"num_questions": 3, "exact_match": 1, "majority": 0}}
    )
    state = site.read()
    assert list(state.scores) == ["val", "a"]
    line = "a: 100.0% exact match on 3 questions; majority baseline (the most frequent training answer): 0.0%"
    assert line in state.text()
