"""A signal to a build and all its processes: it stops cleanly with exit code 75 and loses at most a shard."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest

from lookonce.files import TEMPORARY_MARK
from lookonce.run.open import TO_BUILD, open_run

SLOW_BUILD = """
import time
from lookonce.cache.build import encode
from lookonce.cache.model.tower import Tower
from lookonce.cli import main

encode.num_workers = lambda device: 2  # as with a GPU
encode = Tower.encode

def slowly(self, *arguments):
    time.sleep(0.1)
    return encode(self, *arguments)

Tower.encode = slowly
main(["cache", "build", "run.yaml"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_process_group_stops_a_build_cleanly(make_run, preloaded, tmp_path, number):
    run = make_run()
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    folder = open_run(run, TO_BUILD).cache_folder
    build = preloaded.start(SLOW_BUILD, folder=tmp_path)
    build.wait_until(lambda: list(folder.glob(f"shards/*{TEMPORARY_MARK}*")))
    os.killpg(build.pid, number)
    assert build.wait() == 75, build.error
    error = build.error
    assert f"stopped by {number.name}" in error and "run the same command again to resume" in error
    assert "Traceback" not in error
    assert not list(folder.rglob(f"*{TEMPORARY_MARK}*")) and not list((folder / "claims").iterdir())
    report = open_run(run, TO_BUILD).build()
    assert report.num_missing == 0 and report.num_encoded + report.num_reused == report.num_wanted
    assert (report.num_reused > 0) == (number == signal.SIGUSR1)


def test_a_worker_process_that_was_killed_is_named_with_a_cause(make_run, preloaded, tmp_path):
    """Linux kills processes if there is no memory left."""
    run = make_run()
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    folder = open_run(run, TO_BUILD).cache_folder
    build = preloaded.start(SLOW_BUILD, folder=tmp_path)
    build.wait_until(lambda: list(folder.glob(f"shards/*{TEMPORARY_MARK}*")))
    psutil.Process(build.pid).children()[0].kill()
    assert build.wait() == 1, build.error
    assert re.search("Error: out of memory: (DataLoader worker|a worker process that decodes)", build.error), (
        build.error
    )
    assert "Traceback" not in build.error
