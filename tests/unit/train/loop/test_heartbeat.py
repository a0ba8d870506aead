"""`progress.json`: the progress of a running training, and how it ended."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from lookonce.errors import Stopped
from lookonce.files import write_json
from lookonce.run.log_file import Progress, read_progress
from lookonce.train.loop.log_files import Heartbeat


@pytest.fixture
def path(tmp_path):
    return tmp_path / "progress.json"


def make_steps(heartbeat: Heartbeat, number: int, first: int = 0, of: int = 100, seconds: float = 0.0) -> None:
    state = SimpleNamespace(global_step=first, max_steps=of)
    heartbeat.on_train_begin(None, state, None)
    for _ in range(number):
        heartbeat.on_step_begin(None, state, None)
        time.sleep(seconds)
        state.global_step += 1
        heartbeat.on_step_end(None, state, None)
        heartbeat.on_log(None, state, None, {"loss": 1.5})


def wait_for(path, is_so) -> Progress:
    deadline = time.monotonic() + 5
    while not (found := read_progress(path)) or not is_so(found):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


def test_progress_and_rate_are_written_while_training_runs(path):
    """A new phase is written at once."""
    with Heartbeat(path, samples_per_step=4, beat_s=0.02) as heartbeat:
        assert wait_for(path, lambda found: found.phase == "loading").num_steps == 0
        make_steps(heartbeat, 3, first=10, seconds=0.02)
        found = wait_for(path, lambda found: found.step == 13 and found.ms_per_sample)
        assert (found.first_step, found.num_steps, found.loss, found.end) == (10, 100, 1.5, "")
        assert found.ms_per_sample >= 5 and found.eta_s == pytest.approx(87 * 4e-3 * found.ms_per_sample, abs=0.1)
        heartbeat.enter("evaluating")
        assert read_progress(path).phase == "evaluating"
    assert read_progress(path).end == "finished"


@pytest.fixture
def hanging(monkeypatch) -> SimpleNamespace:
    """A disk on which the first beat hangs until it is released; records what was written, in order."""
    hang = SimpleNamespace(began=threading.Event(), release=threading.Event(), phases=[], timed_out=False)

    def write(path, value):
        if threading.current_thread().name == "heartbeat" and not hang.began.is_set():
            hang.began.set()
            hang.timed_out = not hang.release.wait(5)
        write_json(path, value)
        hang.phases.append(value["phase"])

    monkeypatch.setattr("lookonce.train.loop.log_files.write_json", write)
    return hang


def test_a_new_phase_is_not_undone_by_a_beat_that_began_before_it(path, hanging):
    with Heartbeat(path, 4, beat_s=0.01) as heartbeat:
        assert hanging.began.wait(5)
        releasing = threading.Timer(0.1, hanging.release.set)
        releasing.start()
        heartbeat.enter("evaluating")
        releasing.join()
    assert hanging.phases == sorted(hanging.phases, key=["loading", "evaluating"].index)
    assert {"loading", "evaluating"} == set(hanging.phases)


def test_a_step_does_not_wait_for_the_disk(path, hanging):
    with Heartbeat(path, 4, beat_s=0.01) as heartbeat:
        assert hanging.began.wait(5)
        state = SimpleNamespace(global_step=1, max_steps=2)
        heartbeat.on_step_begin(None, state, None)
        heartbeat.on_step_end(None, state, None)
        hanging.release.set()
    assert not hanging.timed_out


@pytest.mark.parametrize(
    ("error", "end", "reason"),
    [
        (Stopped("stopped by SIGUSR1 after step 3;\nmore"), "stopped", "stopped by SIGUSR1 after step 3;"),
        (KeyboardInterrupt(), "stopped", "interrupted by Ctrl-C"),
        (RuntimeError("no memory"), "failed", "no memory"),
    ],
    ids=["stopped", "interrupted", "failed"],
)
def test_the_end_is_written_with_the_last_step(path, error, end, reason):
    with pytest.raises(type(error)), Heartbeat(path, 4) as heartbeat:
        make_steps(heartbeat, 3)
        raise error
    found = read_progress(path)
    assert (found.end, found.reason, found.step, found.eta_s) == (end, reason, 3, None)


def test_a_full_disk_does_not_stop_a_training_and_a_loss_that_is_no_number_is_left_out(path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, Heartbeat(path, 4, beat_s=0.01) as heartbeat:
        patch.setattr("lookonce.train.loop.log_files.write_json", fail)
        make_steps(heartbeat, 3, seconds=0.02)
        patch.undo()
        heartbeat.on_log(None, None, None, {"loss": float("nan"), "grad_norm": 1.0})
    assert read_progress(path).loss is None


def test_only_the_first_rank_writes(path):
    with Heartbeat(path, 4, is_first=False, beat_s=0.01) as heartbeat:
        make_steps(heartbeat, 3, seconds=0.02)
    assert not path.exists()
