"""Training, resuming and evaluation need no image: with the image folder deleted, every bit is the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from lookonce.errors import ImageError
from lookonce.eval.run import evaluate_run
from lookonce.run.open import TO_BUILD, open_run
from lookonce.train.loop.log_files import MetricsLog
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}


class Interrupted(MetricsLog):
    """Interrupts the training after step 10."""

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if state.global_step == 10:
            raise KeyboardInterrupt


@pytest.fixture
def run(trainings, make_run, sample, tmp_path):
    """A run on a copy of the sample, with a built cache, whose images are then deleted."""
    for name in ("images", "train.jsonl", "val.jsonl", "test.jsonl"):
        copy = shutil.copytree if (sample / name).is_dir() else shutil.copy
        copy(sample / name, tmp_path / name)
    moved = replace(trainings, sample=tmp_path, folder=tmp_path)
    run = make_run(**moved.options("shared"))
    open_run(run, TO_BUILD).build()
    shutil.rmtree(tmp_path / "images")
    return run


@pytest.mark.guarantee("With the image folder deleted, training, resuming and evaluation give the same bits.")
def test_without_images_a_resumed_training_and_its_evaluation_give_the_same_bits(trainings, run, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lookonce.train.train.MetricsLog", Interrupted)
        train(run, **QUIET)
    assert train(run, resume=True, **QUIET).first_step == 8
    other = trainings.uninterrupted("shared")
    trainings.assert_same_adapter(run, other)
    assert trainings.log(run) == trainings.log(other)
    answers = [
        [row["predicted"] for row in read(evaluate_run(folder, "val")[1])] for folder in (run.output, other.output)
    ]
    assert answers[0] and answers[0] == answers[1]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_asked_to_verify_the_images_a_training_misses_them(run):
    with pytest.raises(ImageError, match="No such file or directory"):
        train(run, verify_images=True, **QUIET)
