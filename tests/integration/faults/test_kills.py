"""A training that is killed twenty times, in all of its phases, ends as one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lookonce.run.config import RunFile
from lookonce.run.folder import CLAIM, RunFolder, step_of
from lookonce.workflow import train

KILLED = """
import os, signal, sys
from pkgutil import resolve_name
from lookonce.cli import main

place, number, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
owner, _, name = place.rpartition(".")
real, calls = getattr(resolve_name(owner), name), []

def killed(*args, **options):
    calls.append(args)
    if len(calls) < number:
        return real(*args, **options)
    if how != "before":
        real(*args, **options)
    if how == "half":
        path = str(args[1])
        os.truncate(path, os.path.getsize(path) // 2)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(resolve_name(owner), name, killed)
main(sys.argv[4:])
"""
"""A command that kills itself before or after the given call of a function, or with half of the file that it writes."""
PLAIN = "from lookonce.cli import main; main()"
RESUME = ("train", "run.yaml", "--resume")
CHECKPOINTS = "lookonce.train.loop.checkpoints"
TRAINER = "lookonce.train.loop.trainer:PackTrainer"

IN_THE_START = "a random moment before the first step"
IN_A_STEP = "a random moment in a step or soon after it"
MOMENTS = [
    IN_THE_START,
    ("lookonce.run.folder:Environment.this", 1, "before"),  # the run is recorded, without its environment
    ("lookonce.train.train:Training._load_model", 1, "after"),
    ("torch.save", 1, "half"),  # the optimizer in the first checkpoint
    (f"{TRAINER}._save_rng_state", 1, "before"),
    IN_THE_START,
    (f"{TRAINER}.validation_loss", 2, "after"),
    (f"{CHECKPOINTS}._complete", 1, "before"),  # all files, but no checksums
    (f"{CHECKPOINTS}._complete", 2, "after"),
    (f"{CHECKPOINTS}.shutil.rmtree", 2, "before"),  # in the middle of deleting the oldest checkpoint
    *[IN_A_STEP] * 4,
    ("lookonce.train.train.flush_files", 1, "before"),  # an adapter that may not be on the disk
    ("peft.peft_model.safe_save_file", 1, "half"),  # half an adapter
    ("lookonce.train.train.write_json", 1, "before"),  # an adapter without trained.json
    ("lookonce.eval.answers.files:PartialAnswers.add", 1, "after"),  # answers without predictions
    ("lookonce.eval.run.write_json", 1, "before"),  # predictions without scores
    ("lookonce.workflow.write_json", 1, "before"),  # all but the summary
]


def kill_in_a_step(process, run: RunFolder, rng: random.Random) -> None:
    """Kill a training some steps after its checkpoint."""
    before, target = run.log.stat().st_ino, step_of(run.last_checkpoint) + rng.randint(1, 3)

    def has_stepped() -> bool:  # a training that resumes writes the log again, without the lines of later steps
        lines = run.log.read_text().splitlines()[:-1]
        return run.log.stat().st_ino != before and any(json.loads(line)["step"] >= target for line in lines)

    process.wait_until(has_stepped)
    time.sleep(rng.uniform(0, 0.02))
    os.kill(process.pid, signal.SIGKILL)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def runs(trainings, tmp_path: Path) -> tuple[RunFile, RunFile]:
    """The same training twice: one to kill, and one that has ended undisturbed."""
    options = trainings.options("shared", steps=40) | {"eval": {"split": "val", "max_new_tokens": 1}}
    undisturbed = trainings.make_run(output=str(tmp_path / "undisturbed"), **options)
    train(undisturbed, notify=lambda note: None)
    return trainings.make_run(**options), undisturbed


@pytest.mark.guarantee(
    "A training that is killed twenty times, in all of its phases, ends with the adapter, log, predictions and"
    " files of one that was not."
)
@pytest.mark.parametrize("seed", [17])
def test_a_training_that_is_killed_twenty_times_ends_as_one_that_was_not(trainings, preloaded, runs, tmp_path, seed):
    (run, undisturbed), rng = runs, random.Random(seed)
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert len(MOMENTS) == 20
    for moment in MOMENTS:
        if isinstance(moment, tuple):
            place, number, how = moment
            process = preloaded.start(KILLED, place, str(number), how, *RESUME, folder=tmp_path)
        else:
            process = preloaded.start(PLAIN, *RESUME, folder=tmp_path)
        if moment == IN_THE_START:
            time.sleep(rng.uniform(0, 0.3))
            os.kill(process.pid, signal.SIGKILL)
        elif moment == IN_A_STEP:
            kill_in_a_step(process, RunFolder(run.output), rng)
        assert process.wait() == -signal.SIGKILL, (moment, process.error)
    assert (run.output / CLAIM).exists()
    last = preloaded.start(PLAIN, *RESUME, folder=tmp_path)
    assert last.wait() == 0, last.error
    trainings.assert_same_adapter(run, undisturbed)
    assert trainings.log(run) == trainings.log(undisturbed)
    assert names(run.output) == names(undisturbed.output)
    for name in ("predictions/val.jsonl", "metrics/val.json"):
        assert (run.output / name).read_bytes() == (undisturbed.output / name).read_bytes()
