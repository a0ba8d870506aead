"""Signals that ask to stop: SIGUSR1 finishes the current shard, SIGTERM drops it, and the next build resumes."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

import pytest
import yaml
from click.testing import CliRunner
from support.processes import NOTICE, WARNING, send

from lookonce.cache.build import worker as build_module
from lookonce.cache.build.encode import MAX_ON_DEVICE
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.claims import Claims
from lookonce.cache.store.metadata import read_plan
from lookonce.claim_file import Process
from lookonce.cli import main
from lookonce.errors import Stopped

pytestmark = pytest.mark.usefixtures("one_tower", "no_fsync", "restored_handlers")

EX_TEMPFAIL = 75
NUM_IMAGES = 8


@pytest.mark.parametrize(
    ("signals", "finishes"),
    [([NOTICE], True), ([WARNING], False), ([NOTICE, NOTICE], False), ([NOTICE, WARNING], False)],
)
def test_a_stopped_build_leaves_no_partial_files_and_the_next_one_resumes(site, images, signals, finishes):
    site.build(images, root="undisturbed")
    shards = read_plan(site.folder("undisturbed")).shards
    in_second = len(shards[0].keys) + 1 + MAX_ON_DEVICE  # encoded just after the first shard was finished
    tower = site.Tower(on_image=lambda number: send(*signals) if number == in_second else None)
    with pytest.raises(Stopped, match=rf"stopped by {signals[0].name} after \d shards?, \d of {len(shards)} are left"):
        site.build(images, tower)
    assert not site.leftovers()
    names = sorted(path.stem for path in site.folder().glob("receipts/*"))
    assert names == [shard.name for shard in shards[: len(names)]]
    assert len(names) == (2 if finishes else 1)

    resumed = site.build(images)
    assert resumed.num_encoded == NUM_IMAGES - sum(len(shard.keys) for shard in shards[: len(names)])
    assert site.stored() == site.stored("undisturbed")


def test_a_notice_during_the_last_shard_does_not_stop_the_build(site, images):
    tower = site.Tower(on_image=lambda number: number == NUM_IMAGES and send(NOTICE))
    report = site.build(images, tower, shard_bytes=10**9)
    assert (report.num_encoded, report.num_missing) == (NUM_IMAGES, 0)
    assert (report.folder / "index.safetensors").exists()


def test_a_build_that_waits_for_others_stops_on_a_signal(site, images, monkeypatch):
    monkeypatch.setattr(build_module, "POLL_S", 0.02)
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(0))
    others = Claims(site.folder(), replace(Process.this(), machine="elsewhere"))
    claims = [others.take(shard.name, 1) for shard in read_plan(site.folder()).shards]
    timer = threading.Timer(0.2, send, [WARNING])
    timer.start()
    start = time.monotonic()
    with pytest.raises(Stopped, match="stopped by SIGTERM after 0 shards"):
        site.build(images, site.no_tower)
    timer.join()
    assert 0.1 < time.monotonic() - start < 10
    assert all(claim.is_held() for claim in claims)


@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("error", [RuntimeError, EOFError, ConnectionResetError, FileNotFoundError])
def test_a_build_whose_decoding_processes_a_signal_has_ended_is_stopped(site, images, error, is_asked):
    """torch meets a dead process at any point of handing over an image, perhaps before the signal arrives here."""
    timer = threading.Timer(0.05, send, [WARNING])

    def end_processes(number: int) -> None:
        if number == 3:
            if is_asked:
                timer.start()
            raise error("from a process that has ended")

    with pytest.raises(Stopped if is_asked else error):
        site.build(images, site.Tower(on_image=end_processes))
    assert not site.leftovers()


def test_an_error_restores_the_handlers(site, images):
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(3))
    assert signal.getsignal(WARNING) is signal.SIG_IGN


def test_a_stopped_command_exits_with_75_and_can_be_run_again(make_run, sample, tmp_path, monkeypatch):
    run_file = tmp_path / "run.yaml"
    run = make_run(data={"train": str(sample / "val.jsonl"), "val": [], "test": []})
    run_file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    encode = Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda *args: (send(WARNING), encode(*args))[1])
    stopped = CliRunner().invoke(main, ["cache", "build", str(run_file)])
    assert stopped.exit_code == EX_TEMPFAIL == Stopped.exit_code, stopped.output
    assert (
        "Error: stopped by SIGTERM after 0 shards" in stopped.stderr and "run the same command again" in stopped.stderr
    )
    monkeypatch.undo()
    assert CliRunner().invoke(main, ["cache", "build", str(run_file)]).exit_code == 0
