"""`lookonce status`: what of a run is done and what is missing, in every state that a pipeline can be left in."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lookonce.cache.store.claims import Claims, Worker
from lookonce.cli import main
from lookonce.datasets.records import read_records, write_records
from lookonce.errors import RunFolderError
from lookonce.eval.run import evaluate_run
from lookonce.files import write_json
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.inputs import Inputs
from lookonce.run.progress_file import Progress
from lookonce.status.report import State
from lookonce.status.status import Pipeline, find_log, find_training, next_command
from lookonce.workflow.train import train

ME = Worker.this_process()
NOWHERE = replace(ME, machine="another", host="node-7", job="12_3 (restart 1)")
NUM_STEPS = 2


@pytest.fixture(scope="session")
def trained(built, sample, tmp_path_factory) -> RunFile:
    """A finished run on the sample; not to be written to."""
    values = {
        "model": {"path": str(sample / "model")},
        "data": {split: str(sample / f"{split}.jsonl") for split in ("train", "val", "test")},
        "cache": {"dir": str(built.folder.parent), "dtype": "float32", "shard_mb": 1},
        "lora": {"rank": 4, "alpha": 8},
        "batch": {"samples_per_step": 8, "samples_per_forward": 8},
        "train": {"steps": NUM_STEPS, "precision": "fp32", "logging_steps": 1, "seed": 0, "save_steps": 1},
        "eval": {"max_new_tokens": 1, "batch_size": 64},
        "output": str(tmp_path_factory.mktemp("runs") / "run"),
    }
    run = RunFile.model_validate(values)
    train(run, notify=lambda note: None)
    return run


@dataclass
class Site:
    """A run with its own data, cache and output, which may be at any stage."""

    folder: Path
    run: RunFile
    trained: RunFile

    def plan(self) -> None:
        Inputs.open(self.run).write_plan()

    def cache(self) -> None:
        shutil.copytree(self.trained.cache.dir, self.run.cache.dir, dirs_exist_ok=True)

    def train(self, *removed: str) -> None:
        """As if it had been trained here, up to what is removed."""
        shutil.copytree(self.trained.output, self.run.output)
        for name in removed:
            for path in self.run.output.glob(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def begin(self) -> None:
        """As a training leaves its folder before its first step."""
        self.train(*{path.name for path in self.trained.output.iterdir()} - {"run.json", "run.yaml"})

    def remove(self, pattern: str) -> None:
        [path] = self.run.cache.dir.glob(f"*/{pattern}")
        path.unlink()

    def says(self, **values: Any) -> None:
        """What the training says of itself."""
        self.run.output.mkdir(exist_ok=True)
        progress = Progress(ME, 0.0, "training", step=1, num_steps=NUM_STEPS, loss=0.5, ms_per_sample=2.0, eta_s=9.0)
        write_json(self.run.output / "progress.json", asdict(replace(progress, **values)))

    def look(self) -> State:
        return Pipeline.open(self.run).look()


@pytest.fixture
def site(make_run, sample, trained, tmp_path) -> Site:
    shutil.copytree(sample, tmp_path / "data", ignore=shutil.ignore_patterns("model"))
    data = {split: str(tmp_path / "data" / f"{split}.jsonl") for split in ("train", "val", "test")}
    sections = trained.model_dump(mode="json", include={"lora", "batch", "train", "eval"})
    return Site(tmp_path, make_run(data=data, **sections), trained)


def nothing(site: Site) -> None:
    pass


def planned(site: Site) -> None:
    site.plan()


def cached(site: Site) -> None:
    site.cache()


def half_cached(site: Site) -> None:
    site.cache()
    site.remove("receipts/shard-00001.json")
    site.remove("shards/shard-00001.safetensors")


def under_way(site: Site) -> None:
    site.cache()
    site.begin()
    site.says()


def killed(site: Site) -> None:
    site.cache()
    site.train("trained.json", "summary.json", "metrics", "predictions", "adapter")
    site.says(worker=replace(ME, born=0.0))


def stopped(site: Site) -> None:
    killed(site)
    site.says(end="stopped", reason="stopped by SIGUSR1 after step 1 of 2, which is saved; go on")


def failed_at_once(site: Site) -> None:
    under_way(site)
    site.says(step=0, end="failed", reason="no memory")


def evaluating(site: Site) -> None:
    site.cache()
    site.train("summary.json", "metrics")
    site.says(phase="evaluating")


def not_evaluated(site: Site) -> None:
    site.cache()
    site.train("summary.json", "metrics")


def evaluated_by_hand(site: Site) -> None:
    site.cache()
    site.train("summary.json")


def finished(site: Site) -> None:
    site.cache()
    site.train()


def cache_gone_afterwards(site: Site) -> None:
    site.train()


def a_question_changed_afterwards(site: Site) -> None:
    finished(site)
    change_records(site)


def a_question_changed_before_training(site: Site) -> None:
    site.cache()
    change_records(site)


def change_records(site: Site) -> None:
    path = site.folder / "data" / "train.jsonl"
    path.write_text(path.read_text().replace("?", " now?", 1))


def an_image_came(site: Site) -> None:
    site.cache()
    path = site.folder / "data" / "train.jsonl"
    first, *others = read_records(path)
    content = first.images[0].read_bytes()
    new = first.images[0].with_name("new.jpg")
    new.write_bytes(content + b"\0")
    write_records(site.folder / "data" / "more.jsonl", [replace(first, images=(new,)), first, *others])
    shutil.move(site.folder / "data" / "more.jsonl", path)


def an_image_was_edited(site: Site) -> None:
    site.cache()
    path = sorted((site.folder / "data" / "images").iterdir())[0]
    path.write_bytes(path.read_bytes() + b"\0")


def an_image_is_lost(site: Site) -> None:
    site.cache()
    sorted((site.folder / "data" / "images").iterdir())[0].unlink()


def a_shards_file_is_lost(site: Site) -> None:
    site.cache()
    site.remove("shards/shard-00001.safetensors")


STATES: dict[Callable[[Site], None], tuple[list[str], str, list[str], str]] = {
    nothing: (["plan", "cache", "train", "eval"], "not begun", [], "cache build"),
    planned: (["cache 2", "train", "eval"], "not begun", [], "cache build"),
    half_cached: (["cache 1", "train", "eval"], "not begun", [], "cache build"),
    cached: (["train", "eval"], "not begun", [], "train run.yaml"),
    under_way: (["train", "eval"], "running", [], "status run.yaml --watch 10"),
    killed: (["train", "eval"], "dead", [], "train run.yaml --resume"),
    stopped: (["train", "eval"], "stopped", [], "train run.yaml --resume"),
    failed_at_once: (["train", "eval"], "failed", [], "train run.yaml"),
    evaluating: (["eval"], "running", [], "status run.yaml --watch 10"),
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
    an_image_came: (["plan", "cache", "train", "eval"], "not begun", [], "cache build"),
    an_image_was_edited: (["plan", "cache", "train", "eval"], "not begun", [], "cache build"),
    an_image_is_lost: (["train", "eval"], "not begun", ["1 image can not be read"], "train run.yaml"),
    a_shards_file_is_lost: (["train", "eval"], "not begun", ["1 finished shard"], "cache repair run.yaml"),
}


@pytest.mark.parametrize(("prepare", "expected"), STATES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_missing_follows_from_what_lies_there(site, monkeypatch, prepare, expected):
    missing, training, notes, command = expected
    monkeypatch.setattr("lookonce.status.status.shutil.which", lambda name: None)
    prepare(site)
    state = site.look()
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
    assert site.look().missing() == ["train", "eval"]


def test_without_a_plan_no_image_is_read(site, monkeypatch):
    def read(*arguments):
        raise AssertionError("read an image")

    monkeypatch.setattr("lookonce.datasets.images._read_file", read)
    state = site.look()
    assert state.missing()[0] == "plan"
    assert "the records name 66 image files" in state.text()


def test_what_can_not_be_encoded_is_told_and_not_missing(site):
    path = sorted((site.folder / "data" / "images").iterdir())[0]
    path.write_bytes(b"no image")
    Inputs.open(site.run).build()
    state = site.look()
    assert state.missing() == ["train", "eval"]
    [note] = state.notes
    assert "1 image could not be encoded" in note and "quarantine.jsonl" in note


def test_a_run_with_nothing_to_evaluate_on_is_done_when_it_is_trained(site):
    site.cache()
    site.run = site.run.model_copy(update={"data": site.run.data.model_copy(update={"val": []})})
    assert site.look().missing() == ["train"]


def test_what_status_wants_evaluated_is_what_eval_of_the_run_file_evaluates(site):
    """A split that was named after the training, of records that it had not."""
    finished(site)
    trained_with = json.loads((site.run.output / "run.json").read_text())
    trained_with["run"]["data"]["test"] = []
    write_json(site.run.output / "run.json", trained_with)
    site.run = site.run.model_copy(update={"eval": site.run.eval.model_copy(update={"split": "test"})})
    assert site.look().missing() == ["eval"]
    (site.folder / "run.yaml").write_text(site.run.to_yaml())
    evaluate_run(site.folder / "run.yaml")
    assert site.look().missing() == []


def test_eval_refuses_a_run_file_of_another_training(site):
    finished(site)
    changed = site.run.model_copy(update={"lora": site.run.lora.model_copy(update={"rank": 8})})
    (site.folder / "run.yaml").write_text(changed.to_yaml())
    with pytest.raises(RunFolderError, match=r"holds another run; it differs in\n  run.lora.rank"):
        evaluate_run(site.folder / "run.yaml")


def test_scores_stand_beside_the_majority_baseline_that_of_the_runs_split_first(site):
    finished(site)
    write_json(
        site.run.output / "metrics" / "a.json", {"overall": {"num_questions": 3, "exact_match": 1, "majority": 0}}
    )
    state = site.look()
    assert list(state.scores) == ["val", "a"]
    assert "a: 100.0% exact match on 3 questions; always the majority answer: 0.0%" in state.text()
    assert f"{state.scores['val'].exact_match:.1%} (majority {state.scores['val'].majority:.1%})" in state.line()


# --- the training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "silent_s", "state", "text"),
    [
        ({}, 5, "running", "step 1 of 2, loss 0.5000, 2.0 ms a sample, steps done in 4.0 s, heard of 5"),
        ({"phase": "loading", "num_steps": 0}, 5, "running", "loading"),
        ({"worker": NOWHERE}, 5, "running", "(job 12_3 (restart 1))"),
        ({"worker": NOWHERE}, 500, "dead", "dead at step 1 of 2, heard of 8 min 20 s ago (job 12_3 (restart 1)), no"),
        ({"worker": replace(ME, born=0.0)}, 5, "dead", "dead at step 1 of 2"),
        ({"end": "stopped", "reason": "stopped by SIGTERM after step 1; go on"}, 500, "stopped", "by SIGTERM after"),
        ({"end": "failed", "reason": "no memory"}, 500, "failed", "failed at step 1 of 2: no memory, no checkpoint"),
    ],
)
def test_a_training_is_what_it_said_last_unless_it_is_silent(site, put_back, said, silent_s, state, text):
    site.says(**said)
    put_back(site.run.output / "progress.json", silent_s)
    stage = find_training(RunFolder(site.run.output), expiry_s=180)
    assert stage.state == state and text in stage.text()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 3}', '{"worker": {"name": "x"}}'])
def test_a_training_that_says_nothing_readable_is_known_by_its_checkpoints(site, content):
    site.train("trained.json", "summary.json")
    (site.run.output / "progress.json").write_text(content)
    stage = find_training(RunFolder(site.run.output), expiry_s=180)
    assert (stage.state, stage.checkpoint) == ("stopped", f"checkpoint-{NUM_STEPS}")


# --- logs and workers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "log"),
    [
        ("12_3", "cache-12_3.out"),
        ("12_3 (restart 2)", "cache-12_3.out"),
        ("15", "train-15.out"),
        ("16", "eval-16_4294967294.out"),
        ("12", "cache-12_13.out"),
        ("2", None),
        ("", None),
    ],
)
def test_the_log_of_a_job_is_found_by_its_number(tmp_path, monkeypatch, job, log):
    monkeypatch.chdir(tmp_path)
    assert find_log(job) is None
    (tmp_path / "logs").mkdir()
    for age, name in enumerate(("cache-12_3", "train-15", "eval-16_4294967294", "cache-12_13", "cache-112_3")):
        path = tmp_path / "logs" / f"{name}.out"
        path.touch()
        os.utime(path, (age, age))
    assert find_log(job) == (Path("logs") / log if log else None)


def test_a_dead_worker_is_named_with_the_log_to_read(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    half_cached(site)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "cache-12_3.out").touch()
    folder = site.look().cache.report.folder
    with Claims(folder, replace(ME, name="3/8", born=0.0, job="12_3")) as claims:
        claims.take("shard-00001", 15)
        state = site.look()
    [log] = state.logs
    assert log.startswith("worker 3/8 is dead") and log.endswith("read logs/cache-12_3.out")
    assert log in state.text() and "1 worker, 1 dead" in state.line() and not state.is_under_way


# --- the command ------------------------------------------------------------------------------------------------------


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in ("status", *words)])


@pytest.fixture
def run_file(site) -> Path:
    path = site.folder / "run.yaml"
    path.write_text(site.run.to_yaml())
    return path


def test_missing_is_a_line_a_stage_and_nothing_when_all_is_done(site, run_file):
    result = call(run_file, "--missing")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "plan\ncache\ntrain\neval\n", "")
    finished(site)
    result = call(run_file, "--missing")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    result = call(run_file, "--missing", "--set", "lora.rank=8")
    assert (result.exit_code, result.stdout) == (0, "train\neval\n") and "lora.rank" in result.stderr


def test_the_last_line_is_the_command_to_run_next(site, run_file):
    site.cache()
    result = call(run_file, "--set", "train.seed=1")
    assert result.stdout.splitlines()[-1].endswith(f"train {run_file} --set train.seed=1")


def test_json_has_the_keys_that_help_names(site, run_file):
    finished(site)
    value = json.loads(call(run_file, "--json").stdout)
    named = call("-h").stdout
    for part in (value, value["cache"], value["training"]):
        assert all(key in named for key in part if key not in ("is_trained", "is_evaluated")), part.keys()
    assert (value["missing"], value["training"]["num_steps"], value["cache"]["num_shards"]) == ([], NUM_STEPS, 2)
    assert json.loads(call(run_file, run_file, "--json").stdout)[1].keys() == value.keys()


def test_several_runs_are_a_table(site, run_file, tmp_path):
    finished(site)
    other = tmp_path / "other.yaml"
    other.write_text(site.run.model_copy(update={"output": tmp_path / "other"}).to_yaml())
    header, first, second = call(run_file, other).stdout.splitlines()
    assert first.split()[-1] == "nothing" and second.endswith("train, eval") and "64/64 images" in second


def test_a_watch_ends_when_all_is_done_and_is_a_line_each_time(site, run_file, monkeypatch):
    def train():
        shutil.rmtree(site.run.output)
        site.train()

    steps = iter([site.cache, site.begin, site.says, train])
    monkeypatch.setattr("lookonce.commands.status.time.sleep", lambda seconds: next(steps)())
    result = call(run_file, "--watch", 1)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) == 5 and next(steps, None) is None
    assert lines[0] == "cache no plan; training not begun; evaluation not yet"
    assert "cache 64/64 images; training step 1 of 2, loss 0.5000" in lines[3]
    assert "training finished" in lines[4]


def test_missing_is_not_watched(run_file):
    assert call(run_file, "--missing", "--watch", 1).exit_code == 2


def test_where_slurm_is_its_script_does_what_is_missing(site, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "submit.sh").touch()
    monkeypatch.setattr("lookonce.status.status.shutil.which", lambda name: f"/bin/{name}")
    assert next_command(site.run, site.look(), Path("run.yaml"), ()) == "slurm/submit.sh run.yaml"
