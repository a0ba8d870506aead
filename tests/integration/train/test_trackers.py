"""Real trackers: their files lie in the run folder, with losses, settings and scores; a resumed training continues."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import struct
from collections import Counter
from pathlib import Path

import pytest

from lookonce.errors import Stopped
from lookonce.workflow import train

USER_SETTINGS = ("TENSORBOARD", "WANDB", "MLFLOW")
OTHERS_WARN = pytest.mark.filterwarnings("ignore")  # the trackers use what Python and each other call deprecated


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No settings of the user, W&B offline, and an empty working directory, which stays empty."""
    for name in list(os.environ):
        if name.startswith(USER_SETTINGS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    yield
    assert list(here.iterdir()) == []


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; pip install 'lookonce[{package}]'")


@pytest.fixture
def tracked(make_run, built):
    """Trains a run with a tracker in two parts; returns the run, the notes of the first part and the last summary."""

    def tracked(name: str, **changed_when_resumed):
        options = {"steps": 4, "save_steps": 2, "eval_steps": 2, "track": name}
        others = {"cache": {"dir": str(built.folder.parent)}, "eval": {"max_new_tokens": 1, "every": 2}}
        notes: list[str] = []
        stop_after(make_run(train=options, **others), 2, notes.append)
        run = make_run(train=options | changed_when_resumed, **others)
        summary = train(run, resume=True, notify=lambda note: None)
        return run, notes, summary

    return tracked


def stop_after(run, step, notify):
    """Train until a step, after which the first part of the training is stopped with a checkpoint."""
    from lookonce.train.loop.log_files import MetricsLog

    class Stopping(MetricsLog):
        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            if state.global_step == step:
                raise Stopped("stopped by a test")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr("lookonce.train.train.MetricsLog", Stopping)
        train(run, notify=notify)


@pytest.mark.guarantee("All trackers get the scores, and write to the run folder alone.")
@OTHERS_WARN
def test_tensorboard(tracked):
    needs("tensorboard")
    run, notes, summary = tracked("tensorboard")
    folder = run.output / "tensorboard"
    assert any(str(folder) in note and "tensorboard --logdir" in note for note in notes)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    names = {"train/tokens_per_second", "eval/loss", "eval/exact_match", "final/exact_match"}
    assert names <= set(events.Tags()["scalars"])
    assert events.Scalars("final/exact_match")[0].value == pytest.approx(summary.exact_match)
    text = events.Tensors("run/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"samples_per_step": 8' in text and '"records"' in text
    assert not list((run.output / "checkpoints").glob("runs*"))
    assert len(list(folder.iterdir())) == 2, "a file each for the training that was stopped and the one that resumed it"


KILLED = """
import os, signal
from peft import PeftModel
from lookonce.cli import main
from lookonce.train.loop.log_files import MetricsLog
from lookonce import workflow

def kill(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

class Killing(MetricsLog):
    def on_step_begin(self, args, state, control, **kwargs):
        super().on_step_begin(args, state, control, **kwargs)
        if state.global_step == step:
            kill()

{where}
main(["train", "run.yaml"])
"""
AFTER_STEP = "import lookonce.train.train as train; train.MetricsLog = Killing; step = "
KILLS = {
    "before the first checkpoint": AFTER_STEP + "3",
    "after a checkpoint": AFTER_STEP + "6",
    "as the adapter is saved": "PeftModel.save_pretrained = kill",
    "as questions are answered": "workflow._evaluate = kill",
}


SAME = {
    "tensorboard": {"train/loss", "train/train_loss", "train/grad_norm", "eval/loss", "final/exact_match"},
    "mlflow": {"loss", "train_loss", "grad_norm", "eval_loss", "final/exact_match"},
}
"""Scalars that have no time in them, by their names in each tracker."""


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, tuple]:
    """What each tracker and the log have of an uninterrupted training; once a module."""
    return {}


@pytest.mark.guarantee(
    "TensorBoard and MLflow get each scalar once a step, also from a training that was killed and resumed; "
    "`train_loss` and the other losses are then those of an uninterrupted training, bit for bit."
)
@OTHERS_WARN
@pytest.mark.parametrize("where", KILLS)
@pytest.mark.parametrize("tracker", SAME)
def test_trackers_have_a_killed_and_resumed_training_as_if_uninterrupted(
    make_run, built, preloaded, tmp_path, uninterrupted, tracker, where
):
    """Each scalar once a step, with the same values, also where a line of the log has steps of both parts."""
    needs(tracker)
    options = {"steps": 8, "save_steps": 4, "eval_steps": 4, "logging_steps": 3, "track": tracker}
    others = {"cache": {"dir": str(built.folder.parent)}, "eval": {"max_new_tokens": 1}}
    if tracker not in uninterrupted:
        whole = make_run(train=options, output=str(tmp_path / "whole"), **others)
        train(whole, notify=lambda note: None)
        uninterrupted[tracker] = SCALARS[tracker](whole), losses(whole)
    run, (expected, expected_losses) = make_run(train=options, **others), uninterrupted[tracker]
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert preloaded.start(KILLED.format(where=KILLS[where]), folder=tmp_path).wait() == -signal.SIGKILL
    train(run, resume=True, notify=lambda note: None)
    found = SCALARS[tracker](run)
    times_logged = Counter((name, step) for name, events in found.items() for step, _ in events)
    assert {one: times for one, times in times_logged.items() if times > 1} == {}
    assert times_logged.keys() == {(name, step) for name, events in expected.items() for step, _ in events}
    assert {name: found[name] for name in SAME[tracker]} == {name: expected[name] for name in SAME[tracker]}
    assert losses(run) == expected_losses


@OTHERS_WARN
def test_tensorboard_may_be_named_when_a_training_is_resumed(make_run, built):
    needs("tensorboard")
    options, others = {"steps": 4, "save_steps": 2}, {"cache": {"dir": str(built.folder.parent)}, "data": {"val": []}}
    stop_after(make_run(train=options, **others), 2, lambda note: None)
    run = make_run(train=options | {"track": "tensorboard"}, **others)
    train(run, resume=True, notify=lambda note: None)
    assert [step for step, _ in tensorboard_scalars(run)["train/loss"]] == [3, 4]


def tensorboard_scalars(run) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each scalar that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.output / "tensorboard")).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def mlflow_scalars(run) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each metric of the newest run."""
    folder = run.output / "mlruns"
    newest = max((found for _, found in mlflow_runs(folder)), key=lambda found: found.info.start_time)
    histories = {
        name: mlflow_client(folder).get_metric_history(newest.info.run_id, name) for name in newest.data.metrics
    }
    return {name: [(one.step, one.value) for one in history] for name, history in histories.items()}


SCALARS = {"tensorboard": tensorboard_scalars, "mlflow": mlflow_scalars}


def losses(run) -> list[tuple[int, float | None, float | None]]:
    lines = [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("eval_loss")) for line in lines]


@pytest.mark.guarantee("All trackers get the scores, and write to the run folder alone.")
@OTHERS_WARN
def test_mlflow(tracked):
    needs("mlflow")
    run, notes, summary = tracked("mlflow", cuda_graphs=False)  # MLflow refuses to change a setting
    folder = run.output / "mlruns"
    assert any(str(folder) in note and "mlflow ui" in note for note in notes)
    [(experiment, found)] = mlflow_runs(folder)
    assert (experiment, found.info.status, found.info.run_name) == ("lookonce", "FINISHED", "run")
    assert found.data.params["batch.samples_per_step"] == "8" and found.data.params["inputs.cache"]
    assert found.data.metrics["final/exact_match"] == pytest.approx(summary.exact_match)
    assert {"loss", "eval_loss", "eval_exact_match", "tokens_per_second"} <= set(found.data.metrics)
    history = mlflow_client(folder).get_metric_history(found.info.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2, 3, 4]


@OTHERS_WARN
def test_mlflow_at_the_users_address(make_run, built, monkeypatch, tmp_path):
    needs("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "polyps")
    run = make_run(train={"steps": 1, "track": ["mlflow"]}, cache={"dir": str(built.folder.parent)}, data={"val": None})
    notes: list[str] = []
    train(run, notify=notes.append)
    assert any(note == f"MLflow logs to {(tmp_path / 'server').as_uri()}" for note in notes)
    assert not (run.output / "mlruns").exists()
    assert [experiment for experiment, _ in mlflow_runs(tmp_path / "server")] == ["polyps"]


def mlflow_client(folder: Path):
    import mlflow

    return mlflow.MlflowClient(folder.as_uri())


def mlflow_runs(folder: Path):
    client = mlflow_client(folder)
    return [
        (experiment.name, run)
        for experiment in client.search_experiments()
        for run in client.search_runs([experiment.experiment_id])
    ]


@pytest.mark.guarantee(
    "Weights & Biases continues the same run; after a kill, it has the steps since the checkpoint twice."
)
@pytest.mark.guarantee("All trackers get the scores, and write to the run folder alone.")
@OTHERS_WARN
def test_wandb_offline(tracked):
    needs("wandb")
    run, notes, summary = tracked("wandb")
    parts = sorted((run.output / "wandb").glob("offline-run-*"))
    assert any(str(parts[0]) in note and "wandb sync" in note for note in notes)
    assert len({part.name.rpartition("-")[2] for part in parts}) == 1, "a resumed training has the same run"
    logged = [wandb_history(part) for part in parts]
    steps = [line["train/global_step"] for lines, _, _ in logged for line in lines if "train/loss" in line]
    assert steps == [1, 2, 3, 4]
    _, config, scores = logged[-1]
    assert config["batch"]["samples_per_step"] == 8 and config["inputs"]["cache"]
    assert scores["final/exact_match"] == pytest.approx(summary.exact_match)


def wandb_history(folder: Path):
    """What a part of an offline run has logged: its lines, its settings and its scores."""
    from wandb.proto import wandb_internal_pb2 as messages

    [file] = folder.glob("*.wandb")
    lines, config, scores = [], {}, {}
    for data in leveldb_records(file.read_bytes()):
        record = messages.Record.FromString(data)
        lines += [values(record.history.item)] if record.HasField("history") else []
        config |= values(record.run.config.update) | values(record.config.update)
        scores |= values(record.summary.update)
    return lines, config, scores


def leveldb_records(data: bytes):
    """The records of a file in LevelDB's log format, after W&B's own header: blocks of 32 kB with parts of records."""
    position, record = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # too short for a part
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def values(items):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
