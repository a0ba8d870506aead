"""Real processes that get a signal in the middle of their work end in seconds, with the exit code and one line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

MAIN = "import sys; from lookonce.cli import main; main(sys.argv[1:])"


@pytest.fixture
def place(sample, built, make_run, tmp_path) -> Path:
    """A folder with a run file on the sample's cache."""
    run = make_run(cache={"dir": str(built.folder.parent)}, train={"steps": 1})
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    return tmp_path


@pytest.mark.guarantee("A signal or Ctrl-C ends every command with a documented exit code and one line.")
@pytest.mark.parametrize(
    ("words", "number", "code", "message"),
    [
        ("status run.yaml", signal.SIGHUP, 75, "stopped by SIGHUP"),
        ("status run.yaml --set cache.dtype=bfloat16", signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_signal_to_the_process_group_ends_a_command(preloaded, place, words, number, code, message):
    slow = "import time, lookonce.status as s; s.find_state = lambda run: (print(1, flush=True), time.sleep(60))\n"
    process = preloaded.start(slow + MAIN, *words.split(), folder=place)
    process.wait_until(lambda: (place / "program.out").exists() and process.out)
    os.killpg(process.pid, number)
    assert process.wait(30) == code, process.error
    assert process.error == f"Error: {message}; run the same command again\n"


def test_a_stopped_evaluation_says_which_answers_are_kept_and_resumes(preloaded, place):
    slow = "from lookonce.eval.answers.files import PartialAnswers as P; import time; add = P.add\n"
    slow += "P.add = lambda *arguments: (add(*arguments), time.sleep(0.2))\n"
    words = ("eval", "run.yaml", "--untuned", "--set", "eval.tokens_per_batch=600")
    process = preloaded.start(slow + MAIN, *words, folder=place)
    partial = place / "run" / "predictions" / "val-untuned.partial-0.jsonl"
    process.wait_until(lambda: partial.exists() and len(partial.read_text().splitlines()) > 2)
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait() == 75, process.error
    kept = sum(len(json.loads(line).get("answers", ())) for line in partial.read_text().splitlines())
    path = os.path.relpath(partial, place)
    said = f"stopped by SIGUSR1; run the same command again; {kept} answers are kept in "
    assert kept and said in process.error and path in process.error, process.error
    again = preloaded.start(MAIN, *words, folder=place)
    assert again.wait() == 0 and f"{kept} of 69 questions were answered before" in again.error, again.error
