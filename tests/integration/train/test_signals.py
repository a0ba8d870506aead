"""A signal to a build or a training, as from Slurm: it stops cleanly with exit code 75 and loses nothing."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest
import torch

from lookonce.errors import Stopped
from lookonce.train import train as run_module
from lookonce.train.loop import distributed as stopping
from lookonce.train.loop.distributed import RESUME_HINT
from lookonce.train.loop.log_files import MetricsLog
from lookonce.train.loop.trainer import PackTrainer
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}
pytestmark = pytest.mark.usefixtures("no_fsync")

SIGNALLED = """
import os, sys
import lookonce.run.config as run_file
from lookonce.cli import main

run_file.read_run_file = lambda *_: os.kill(os.getpid(), int(sys.argv[1]))
main([*sys.argv[2:], "run.yaml"])
"""


@pytest.mark.parametrize(("command", "number"), [("cache build", signal.SIGUSR1), ("train", signal.SIGHUP)])
def test_a_signal_before_the_first_image_or_step_stops_a_command_cleanly(
    make_run, preloaded, tmp_path, number, command
):
    (tmp_path / "run.yaml").write_text(make_run().to_yaml())
    process = preloaded.start(SIGNALLED, str(int(number)), *command.split(), folder=tmp_path)
    assert process.wait() == 75 and f"stopped by {number.name}" in process.error, process.error
    assert "Traceback" not in process.error


WAITING = """
import os, signal, sys, threading
import torch
from lookonce.cli import main

join = torch.distributed.init_process_group

def signalled(*args, **options):
    threading.Timer(0.5, os.kill, (os.getpid(), int(sys.argv[1]))).start()
    return join(*args, **options)

torch.distributed.init_process_group = signalled
signal.signal(signal.SIGINT, signal.default_int_handler)
main([*sys.argv[2:], "run.yaml"])
"""


@pytest.mark.parametrize(
    ("command", "rank", "number", "code"),
    [("cache build", 0, signal.SIGTERM, 75), ("train", 0, signal.SIGINT, 130), ("train", 1, signal.SIGUSR1, 75)],
)
def test_a_signal_stops_a_process_that_waits_for_others_to_start(
    make_run, preloaded, tmp_path, command, rank, number, code
):
    (tmp_path / "run.yaml").write_text(make_run().to_yaml())
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {name: str(value) for name, value in variables.items()}
    process = preloaded.start(WAITING, str(int(number)), *command.split(), folder=tmp_path, **environment)
    assert process.wait(timeout_s=30) == code, process.error
    assert f"Error: stopped by {number.name} while waiting for other processes" in process.error


def sending(at, *numbers, event="on_step_begin"):
    """A metrics log that sends signals to its own process at a step."""

    class Sending(MetricsLog):
        pass

    def send(self, args, state, control, **kwargs):
        getattr(MetricsLog, event)(self, args, state, control, **kwargs)
        if state.global_step == at:
            for number in numbers:
                os.kill(os.getpid(), number)

    setattr(Sending, event, send)
    return Sending


@pytest.fixture
def stopped(monkeypatch):
    """Trains until a signal stops it; returns the message."""

    def stopped(run, metrics_log, **options):
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
        with monkeypatch.context() as patch, pytest.raises(Stopped) as raised:
            patch.setattr(run_module, "MetricsLog", metrics_log)
            train(run, **QUIET, **options)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
        return str(raised.value)

    return stopped


def test_a_signal_stops_a_training_after_the_current_step_with_a_checkpoint(trainings, stopped):
    run = trainings.unstarted("shared")
    sent = ((signal.SIGTERM, 6, [4, 6]), (signal.SIGUSR1, 11, [8, 11]))
    for number, step, checkpoints in sent:
        forwarded = [number, signal.SIGUSR1]  # by a launcher, which does not count as a second one
        message = stopped(run, sending(step - 1, number, *forwarded), resume=True)
        assert message == f"stopped by {number.name} after step {step} of 24, which is saved; {RESUME_HINT}"
        assert trainings.checkpoints(run)[-2:] == checkpoints
    assert train(run, resume=True, **QUIET).first_step == 11
    trainings.assert_same_adapter(run, trainings.uninterrupted("shared"))
    assert trainings.log(run) == trainings.log(trainings.uninterrupted("shared"))


@pytest.mark.parametrize(("every", "step"), [(None, 11), (4, 12)])
def test_what_is_due_at_the_step_is_done_once(trainings, stopped, every, step):
    """An epoch has 11 steps; validation, checkpoint and choosing the best may be due at its end, or within it."""
    schedule = {"steps": 14, "save_steps": every, "eval_steps": every, "best": "loss"}
    run = trainings.unstarted("shared", **schedule)
    assert f"after step {step} of 14" in stopped(run, sending(step - 1, signal.SIGUSR1), resume=True)
    assert train(run, resume=True, **QUIET).first_step == step
    trainings.assert_same_adapter(run, trainings.uninterrupted("shared", **schedule))
    assert trainings.log(run) == trainings.log(trainings.uninterrupted("shared", **schedule))


def test_a_checkpoint_of_a_stop_is_not_chosen_as_the_best(trainings, stopped):
    """The step was validated, but an uninterrupted training would not have saved it."""
    schedule = {"steps": 12, "save_steps": 8, "eval_steps": 4, "best": "loss"}
    run = trainings.unstarted("shared", **schedule)
    assert "after step 5 of 12" in stopped(run, sending(3, signal.SIGUSR1))
    train(run, resume=True, **QUIET)
    trainings.assert_same_adapter(run, trainings.uninterrupted("shared", **schedule))


def test_a_second_signal_stops_a_training_at_once(trainings, stopped, monkeypatch):
    monkeypatch.setattr(stopping, "REPEAT_S", 0)
    run = trainings.unstarted("shared")
    message = stopped(run, sending(5, signal.SIGUSR1, signal.SIGTERM))
    assert message.startswith("stopped by SIGTERM before a checkpoint could be written;")
    assert trainings.checkpoints(run) == [4]


def test_a_signal_before_the_first_step_stops_a_training_at_once(trainings, stopped):
    run = trainings.unstarted("shared")
    message = stopped(run, sending(0, signal.SIGTERM, event="on_train_begin"))
    assert message == "stopped by SIGTERM before the first step; run the same command with --resume to continue"
    assert trainings.checkpoints(run) == []


def test_a_signal_during_compilation_is_not_taken_for_an_error_of_the_compiler(trainings, stopped):
    """Dynamo would wrap an `Exception`, and the training would fail with another exit code."""

    def compiler(graph, inputs):
        os.kill(os.getpid(), signal.SIGTERM)
        return graph.forward

    class Compiling(MetricsLog):
        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)
            torch.compile(lambda numbers: numbers + 1, backend=compiler)(torch.zeros(1))

    run = trainings.unstarted("shared")
    assert stopped(run, Compiling).startswith("stopped by SIGTERM before the first step;")
    assert json.loads((run.output / "progress.json").read_text())["end"] == "stopped"


def test_a_signal_in_the_last_step_stops_after_saving_the_adapter(trainings, stopped, monkeypatch):
    run = trainings.unstarted("shared", steps=4)
    message = stopped(run, sending(3, signal.SIGUSR1))
    assert message.startswith("stopped by SIGUSR1 after the last step, the adapter is saved; ")
    monkeypatch.setattr(PackTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    assert train(run, resume=True, **QUIET).num_steps == 4


EVALUATED = """
import os, sys
import lookonce.workflow as run
from lookonce.cli import main

def signalled(*arguments, **options):
    os.kill(os.getpid(), int(sys.argv[1]))
    os._exit(1)

run.evaluate = signalled
main(["train", "run.yaml"])
"""


def test_a_signal_during_evaluation_stops_at_once_and_resuming_evaluates_without_training(
    make_cached_run, preloaded, tmp_path, monkeypatch
):
    run = make_cached_run(train={"steps": 3})
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    process = preloaded.start(EVALUATED, str(int(signal.SIGTERM)), folder=tmp_path)
    assert process.wait() == 75 and "stopped by SIGTERM; run the same command with --resume" in process.error
    assert "Traceback" not in process.error
    monkeypatch.setattr(PackTrainer, "train", lambda *_, **__: pytest.fail("trained again"))
    notes = []
    assert train(run, resume=True, notify=notes.append).num_steps == 3
    assert (
        "adapter already trained; running evaluation" in notes and (run.output / "predictions" / "val.jsonl").exists()
    )
