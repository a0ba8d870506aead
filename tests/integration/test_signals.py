"""A signal to a build and all its processes, as Slurm sends it: an orderly end, exit code 75, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from lookonce.files import TEMPORARY_MARK
from lookonce.train.inputs import Inputs

SLOW_BUILD = """
import sys, time
from lookonce.cache.make import decode
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
import lookonce.train.run_file as run_file
from lookonce.cli import main

run_file.read_run_file = lambda *_: os.kill(os.getpid(), int(sys.argv[1]))
main(["cache", "build", "run.yaml"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_anything_is_in_work_ends_a_build_in_order_too(make_run, tmp_path, number):
    (tmp_path / "run.yaml").write_text(make_run().to_yaml())
    command = [sys.executable, "-c", SIGNALLED, str(int(number))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75 and f"stopped by {number.name}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
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
