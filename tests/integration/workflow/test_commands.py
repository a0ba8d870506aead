"""The commands as a user types them: the README's quick start, and what can go wrong with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import lookonce.bench.step as bench_step
from lookonce.cli import main
from lookonce.version import __version__


@pytest.fixture
def lookonce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> Result:
        done = CliRunner().invoke(main, words)
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.output
        return done

    return run


@pytest.fixture
def run_file(root: Path, tmp_path: Path) -> str:
    """The sample run with fewer epochs."""
    text = (root / "experiments" / "sample.yaml").read_text()
    path = tmp_path / "experiments" / "sample.yaml"
    path.parent.mkdir()
    path.write_text(text.replace("epochs: 24", "epochs: 0.2"))
    return "experiments/sample.yaml"


@pytest.fixture
def cached(lookonce, run_file: str, sample: Path, copy_built, tmp_path: Path) -> str:
    """The run file of the sample in data/sample, with a built cache."""
    shutil.copytree(sample, tmp_path / "data" / "sample")
    copy_built(tmp_path / "caches", tmp_path / "data" / "sample")
    assert "nothing new encoded" in lookonce("cache", "build", run_file).stdout
    return run_file


def quick_start(root: Path) -> list[list[str]]:
    """The commands of the README's quick start."""
    block = re.search(r"^## Quick start$.*?^```sh\n(.*?)^```", (root / "README.md").read_text(), re.M | re.S)[1]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def test_the_readmes_quick_start_goes_from_nothing_to_an_answer(lookonce, run_file, root, tmp_path):
    commands = quick_start(root)
    assert {words[0] for words in commands} == {"lookonce"}
    sample, built, trained, scored, answered = [lookonce(*words[1:]) for words in commands]
    assert "66 images (64 distinct)" in sample.stdout and sample.stdout in (root / "README.md").read_text()
    assert "encoded 64 images" in built.stdout
    assert "nothing new encoded, 64 of 64 images reused" in lookonce("cache", "build", run_file).stdout
    assert "all" in scored.stdout and answered.stdout.strip()
    for words in ("64 distinct", "exact match", "runs/sample/report.html", "runs/sample/adapter", "try next"):
        assert words in trained.stdout
    page = (tmp_path / "runs/sample/report.html").read_text()
    assert "No image of val is also in training (compared by content)" in page and page.count("<img ") == 48
    assert "loss" in trained.stderr and "samples/s" in trained.stderr and "eta" in trained.stderr
    startup = re.findall(r"^([a-z ]+): [\d.]+ (?:s|min|h)\b", trained.stderr.partition("step ")[0], re.M)
    assert startup[0] == "load libraries"
    assert {"read records", "make tokens of train records", "load weights"} <= set(startup)
    assert re.search(r"^first step after \d[\d. hmin]* s", trained.stderr, re.M)
    timed = json.loads((tmp_path / "runs/sample/trained.json").read_text())["startup_seconds"]
    assert timed.keys() == {*startup} | {"other work"}, "what no piece of work accounts for is named too"
    assert "is already trained" in lookonce("train", run_file, "--resume").stderr
    scores = json.loads(lookonce("eval", "runs/sample", "--split", "test", "--json").stdout)
    assert scores["overall"]["num_questions"] > 0
    assert "\nall  " in lookonce("eval", run_file, "--shuffle-images").stdout
    frame = next((tmp_path / "data/sample/images").glob("frame-*.jpg"))
    lookonce("predict", "runs/sample", "--image", str(frame), "--question", "Is there text?")
    listed = lookonce("cache", "gc", run_file).stdout
    assert f"used by {tmp_path / 'runs/sample'}" in listed
    [cache] = (tmp_path / "caches").glob("[0-9a-f]*[0-9]*")
    assert "is used by" in lookonce("cache", "gc", run_file, "--delete", "--cache", cache.name, code=1).stderr
    assert "64 images" in lookonce("cache", "verify", run_file).stdout


def test_variants_are_compared_and_nothing_is_left(lookonce, cached, tmp_path):
    report = json.loads(lookonce("bench", "step", cached, "--steps", "2", "--json").stdout)
    _, from_cache, shared = report["ways"]
    assert [way["way"] for way in report["ways"]] == ["plain", "cached", "shared"]
    assert from_cache["losses"] == pytest.approx(shared["losses"], rel=1e-4)
    assert all(way["num_samples"] == 2 * 8 for way in report["ways"])
    assert not (tmp_path / "runs").exists()
    assert (
        "no training variant is named 'best'" in lookonce("bench", "step", cached, "--variants", "best", code=2).stderr
    )


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGUSR1, 75, "by SIGUSR1"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_stopped_comparison_shows_the_variants_that_have_ended(lookonce, cached, monkeypatch, number, code, message):
    measure = bench_step._measure

    def interrupted(variant, *arguments):
        if variant.name == "shared" and number == signal.SIGINT:
            raise KeyboardInterrupt  # a process in the background ignores the signal
        if variant.name == "shared":
            os.kill(os.getpid(), number)
        return measure(variant, *arguments)

    monkeypatch.setattr(bench_step, "_measure", interrupted)
    stopped = lookonce("bench", "step", cached, "--variants", "cached,shared", "--steps", "1", "--json", code=code)
    report = json.loads(stopped.stdout)
    [ended] = report["ways"]
    assert ended["way"] == "cached" and ended["num_samples"] == 8 and report["missing"] == ["shared"]
    assert message in stopped.stderr


def test_bad_input_is_reported_and_loses_nothing(lookonce, cached, tmp_path):
    lookonce("train", cached)
    error = lookonce("train", cached, "--set", "lora.rank=5", code=1).stderr
    assert "holds another run" in error and "run.lora.rank: this run 5, that one 32" in error
    assert (tmp_path / "runs/sample/summary.json").exists()

    frame = tmp_path / "data/sample/images/frame-0000.jpg"
    frame.rename(frame.with_suffix(".away"))
    lookonce("train", cached)
    error = lookonce("train", cached, "--verify-images", code=1).stderr
    assert "frame-0000.jpg" in error and ".jsonl:" in error

    frame.write_bytes(frame.with_suffix(".away").read_bytes()[:2000])
    built = lookonce("cache", "build", cached, code=1)
    assert "1 image could not be encoded" in built.stdout and "frame-0000.jpg" in built.stdout
    error = lookonce("train", cached, "--set", "output=runs/b", code=1).stderr
    assert "quarantined" in error and "frame-0000.jpg" in error


def test_it_runs_as_a_program_and_as_a_module(tmp_path):
    for program in ([str(Path(sys.executable).with_name("lookonce"))], [sys.executable, "-m", "lookonce"]):
        done = subprocess.run([*program, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and __version__ in done.stdout, done.stderr
        assert "Warning" not in done.stderr
