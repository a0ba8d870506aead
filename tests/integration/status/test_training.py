"""The state of a training, and the logs of slow or dead processes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.cache.store.claims import Claims
from lookonce.claim_file import Process
from lookonce.run.folder import RunFolder
from lookonce.status import find_log, find_training

ME = Process.this()
NOWHERE = replace(ME, machine="another", host="node-7", job="12_3 (restart 1)")


@pytest.mark.parametrize(
    ("said", "silent_s", "state", "text"),
    [
        ({}, 5, "running", "step 1 of 2, loss 0.5000, 2.0 ms per sample, steps done in 4.0 s, last heartbeat 5"),
        (
            {"reward": 0.25, "mixed_share": 0.3},
            5,
            "running",
            "step 1 of 2, reward 0.250, 30% of questions mixed, 2.0 ms",
        ),
        ({"phase": "loading", "num_steps": 0}, 5, "running", "loading"),
        ({"worker": NOWHERE}, 5, "running", "(job 12_3 (restart 1))"),
        (
            {"worker": NOWHERE},
            500,
            "dead",
            "dead at step 1 of 2, last heartbeat 8 min 20 s ago (job 12_3 (restart 1)), n",
        ),
        ({"worker": replace(ME, born=0.0)}, 5, "dead", "dead at step 1 of 2"),
        ({"end": "stopped", "reason": "stopped by SIGTERM after step 1; resume"}, 500, "stopped", "by SIGTERM after"),
        ({"end": "failed", "reason": "no memory"}, 500, "failed", "failed at step 1 of 2: no memory, no checkpoint"),
    ],
)
def test_the_state_of_a_training_is_what_it_wrote_last_unless_it_is_silent(site, backdate, said, silent_s, state, text):
    site.writes_progress(**said)
    backdate(site.run.output / "progress.json", silent_s)
    training = find_training(RunFolder(site.run.output), expiry_s=180)
    assert training.state == state and text in training.text()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 3}', '{"worker": {"name": "x"}}'])
def test_a_training_with_unreadable_progress_is_known_by_its_checkpoints(site, content):
    site.train("trained.json", "summary.json")
    (site.run.output / "progress.json").write_text(content)
    training = find_training(RunFolder(site.run.output), expiry_s=180)
    assert (training.state, training.checkpoint) == ("stopped", f"checkpoint-{site.num_steps}")


@pytest.mark.parametrize(
    ("job", "log"),
    [
        ("12_3", "cache-12_3.out"),
        ("12_3 (restart 2)", "cache-12_3.out"),
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
    site.lose_a_shard()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "cache-12_3.out").touch()
    folder = site.read().cache.report.folder
    with Claims(folder, replace(ME, name="3/8", born=0.0, job="12_3")) as claims:
        claims.take("shard-00001", 15)
        state = site.read()
    [log] = state.logs
    assert log.startswith("worker 3/8 is dead") and log.endswith("read logs/cache-12_3.out")
    assert log in state.text() and not state.is_under_way
