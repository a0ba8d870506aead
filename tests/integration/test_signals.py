"""A signal to a build or a training and all its processes, as Slurm sends it: an orderly end, exit code 75, nothing
lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from lookonce.errors import Stopped
from lookonce.files import TEMPORARY_MARK
from lookonce.run.inputs import Inputs
from lookonce.train import train as run_module
from lookonce.train.loop import preemption as stopping
from lookonce.train.loop.metrics_log import StepLines
from lookonce.train.train import Training
from lookonce.workflow.train import train

BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
QUIET = {"notify": lambda note: None}

SLOW_BUILD = """
import sys, time
from lookonce.cache.build import decode
from lookonce.cache.model.tower import Tower
from lookonce.cli import main

decode.num_workers = lambda device: 2  # as if there were a GPU
encode = Tower.encode

def slowly(self, *arguments):
    time.sleep(0.1)
    return encode(self, *arguments)

Tower.encode = slowly
main(["cache", "build", sys.argv[1]])
"""

SIGNALLED = """
import os, sys
import lookonce.run.config as run_file
from lookonce.cli import main

run_file.read_run_file = lambda *_: os.kill(os.getpid(), int(sys.argv[1]))
main([*sys.argv[2:], "run.yaml"])
"""


@BOTH
@pytest.mark.parametrize("command", ["cache build", "train"])
def test_a_signal_before_anything_is_in_work_ends_a_command_in_order_too(make_run, tmp_path, number, command):
    (tmp_path / "run.yaml").write_text(make_run().to_yaml())
    command = [sys.executable, "-c", SIGNALLED, str(int(number)), *command.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75 and f"stopped by {number.name}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@BOTH
def test_a_signal_to_the_whole_group_ends_a_build_in_order(make_run, tmp_path, number):
    run = make_run()
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    folder = Inputs.open(run).cache_folder
    build = subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILD, str(tmp_path / "run.yaml")],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(folder.glob(f"shards/*{TEMPORARY_MARK}*")):
        assert build.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(build.pid, number)
    _, error = build.communicate(timeout=60)
    assert build.returncode == 75, error
    assert f"stopped by {number.name}" in error and "the same command goes on" in error
    assert "Traceback" not in error
    assert not list(folder.rglob(f"*{TEMPORARY_MARK}*")) and not list((folder / "claims").iterdir())
    report = Inputs.open(run).build()
    assert report.num_missing == 0 and report.num_encoded + report.num_reused == report.num_wanted
    assert (report.num_reused > 0) == (number == signal.SIGUSR1)


def sending(at, *numbers, place="on_step_begin"):
    """Step lines that send signals to their own process at a step."""

    class Sending(StepLines):
        pass

    def send(self, args, state, control, **kwargs):
        getattr(StepLines, place)(self, args, state, control, **kwargs)
        if state.global_step == at:
            for number in numbers:
                os.kill(os.getpid(), number)

    setattr(Sending, place, send)
    return Sending


@pytest.fixture
def stopped(monkeypatch):
    """Trains until it is stopped by a signal; gives what is said then."""

    def stopped(run, lines, **how):
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
        with monkeypatch.context() as patch, pytest.raises(Stopped) as raised:
            patch.setattr(run_module, "StepLines", lines)
            train(run, **QUIET, **how)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
        return str(raised.value)

    return stopped


@BOTH
@pytest.mark.parametrize("mode", ["shared", "separate"])
def test_a_signal_ends_a_training_after_the_step_in_work_which_is_saved(trainings, stopped, number, mode):
    run = trainings.parts(mode)
    said = stopped(run, sending(5, number))
    assert (
        said == f"stopped by {number.name} after step 6 of 24, which is saved; the same command with --resume goes on"
    )
    assert trainings.checkpoints(run) == [4, 6]
    assert train(run, resume=True, **QUIET).first_step == 6
    trainings.assert_same_adapter(run, trainings.whole(mode))
    assert trainings.log(run) == trainings.log(trainings.whole(mode))


@pytest.mark.parametrize("step", [11, 16])
@pytest.mark.parametrize(
    "often",
    [
        {"save_steps": None, "eval_steps": None, "load_best_model_at_end": True},
        {"save_steps": None, "eval_steps": 4},
        {"save_steps": 4, "eval_steps": 4, "load_best_model_at_end": True, "save_total_limit": 1},
        {"save_steps": 11, "eval_steps": None},
    ],
)
def test_what_is_due_at_the_step_is_done_and_is_not_done_twice(trainings, stopped, often, step):
    """An epoch has 11 steps; validation, checkpoint and the choice of the best may be due as it ends, or in it."""
    run = trainings.parts("shared", **often)
    assert f"after step {step} of 24" in stopped(run, sending(step - 1, signal.SIGUSR1))
    assert train(run, resume=True, **QUIET).first_step == step
    trainings.assert_same_adapter(run, trainings.whole("shared", **often))
    assert trainings.log(run) == trainings.log(trainings.whole("shared", **often))


def test_a_step_that_was_validated_but_is_not_due_for_saving_is_not_chosen_as_the_best_for_it(trainings, stopped):
    often = {"save_steps": 8, "eval_steps": 4, "load_best_model_at_end": True}
    run = trainings.parts("shared", **often)
    assert "after step 5 of 24" in stopped(run, sending(3, signal.SIGUSR1))
    train(run, resume=True, **QUIET)
    trainings.assert_same_adapter(run, trainings.whole("shared", **often))


def test_the_same_signal_passed_on_by_a_launcher_is_no_second_one(trainings, stopped):
    run = trainings.parts("shared")
    assert "after step 6" in stopped(run, sending(5, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1))


def test_a_second_signal_ends_a_training_at_once(trainings, stopped, monkeypatch):
    monkeypatch.setattr(stopping, "REPEAT_S", 0)
    run = trainings.parts("shared")
    said = stopped(run, sending(5, signal.SIGUSR1, signal.SIGTERM))
    assert said.startswith("stopped by SIGTERM before a checkpoint could be written;")
    assert trainings.checkpoints(run) == [4]
    assert train(run, resume=True, **QUIET).first_step == 4
    trainings.assert_same_adapter(run, trainings.whole("shared"))


def test_a_signal_before_the_first_step_ends_a_training_at_once(trainings, stopped):
    run = trainings.parts("shared")
    said = stopped(run, sending(0, signal.SIGTERM, place="on_train_begin"))
    assert said == "stopped by SIGTERM before the first step; the same command with --resume goes on"
    assert trainings.checkpoints(run) == []
    stopped(run, sending(5, signal.SIGTERM), resume=True)
    assert "before the first step" in stopped(run, sending(6, signal.SIGTERM, place="on_train_begin"), resume=True)
    assert train(run, resume=True, **QUIET).first_step == 6
    trainings.assert_same_adapter(run, trainings.whole("shared"))


def test_a_signal_while_packs_are_compiled_is_not_taken_for_the_compilers_error(trainings, stopped):
    """Which Dynamo would wrap: the training would have failed, with another exit code."""

    def compiler(graph, inputs):
        os.kill(os.getpid(), signal.SIGTERM)
        return graph.forward

    class Compiling(StepLines):
        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)
            torch.compile(lambda numbers: numbers + 1, backend=compiler)(torch.zeros(1))

    run = trainings.parts("shared")
    assert stopped(run, Compiling).startswith("stopped by SIGTERM before the first step;")
    assert json.loads((run.output / "progress.json").read_text())["end"] == "stopped"


def test_a_signal_in_the_last_step_ends_a_training_that_is_saved(trainings, stopped, monkeypatch):
    run = trainings.parts("shared")
    said = stopped(run, sending(23, signal.SIGUSR1))
    assert said.startswith("stopped by SIGUSR1 after the last step; the adapter is saved; ")
    monkeypatch.setattr(Training, "_fit", lambda *_: pytest.fail("trained again"))
    assert train(run, resume=True, **QUIET).num_steps == 24
    trainings.assert_same_adapter(run, trainings.whole("shared"))


EVALUATED = """
import os, sys
import lookonce.workflow.train as run
from lookonce.cli import main

def signalled(*arguments):
    os.kill(os.getpid(), int(sys.argv[1]))
    os._exit(1)

run.evaluate = signalled
main(["train", "run.yaml"])
"""


@BOTH
def test_a_signal_during_evaluation_ends_at_once_and_resuming_evaluates_without_training(
    make_run, tmp_path, monkeypatch, number
):
    run, undisturbed = make_run(train={"steps": 3}), make_run(train={"steps": 3}, output=str(tmp_path / "undisturbed"))
    Inputs.open(run).build()
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    command = [sys.executable, "-c", EVALUATED, str(int(number))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75 and f"stopped by {number.name}; the same command with --resume" in done.stderr
    assert "Traceback" not in done.stderr
    monkeypatch.setattr(Training, "_fit", lambda *_: pytest.fail("trained again"))
    notes = []
    resumed = train(run, resume=True, notify=notes.append)
    assert "the adapter is trained already; it remains to be evaluated" in notes
    monkeypatch.undo()
    expected = train(undisturbed, **QUIET)
    assert (resumed.num_steps, resumed.exact_match) == (3, expected.exact_match)
    predictions = [made.output / "predictions" / "val.jsonl" for made in (run, undisturbed)]
    assert predictions[0].read_text() == predictions[1].read_text()


SLOW_TRAINING = """
import sys, time
from lookonce.train.loop.trainer import RunTrainer
from lookonce.cli import main

training_step = RunTrainer.training_step

def slowly(self, *arguments):
    time.sleep(0.1)
    return training_step(self, *arguments)

RunTrainer.training_step = slowly
main(["train", sys.argv[1]])
"""


@BOTH
def test_a_signal_to_the_whole_group_ends_a_training_with_a_checkpoint(trainings, tmp_path, number):
    run = trainings.parts("shared")
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_TRAINING, str(tmp_path / "run.yaml")],
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    log, deadline = run.output / "log.jsonl", time.monotonic() + 60
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75, error
    [step] = re.findall(rf"Error: stopped by {number.name} after step (\d+) of 24, which is saved", error)
    assert "Traceback" not in error
    assert train(run, resume=True, **QUIET).first_step == int(step)
    trainings.assert_same_adapter(run, trainings.whole("shared"))
