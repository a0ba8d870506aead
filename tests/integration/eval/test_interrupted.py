"""An evaluation that is interrupted, or shared by ranks, gives the same bytes as any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.answers import interrupt_after, look_trained

from lookonce.eval.answers import engines
from lookonce.eval.run import evaluate_run
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.workflow import train

SAME_PREDICTIONS = pytest.mark.guarantee(
    "An evaluation that is interrupted, or shared by ranks, ends with the same predictions and scores."
)

QUIET = {"notify": lambda note: None}
NUM_BATCHES, NEVER = 11, 99


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "BATCH_SIZE", 8)
        yield


@pytest.fixture(scope="module")
def trained(make_run_in, sample, built, tmp_path_factory) -> RunFile:
    """A finished run, whose test split is answered in 11 batches. Tests must not write to it."""
    run = make_run_in(
        tmp_path_factory.mktemp("trained"),
        data={"val": [], "train": str(sample / "test.jsonl")},
        cache={"dir": str(built.folder.parent)},
        train={"steps": 30, "learning_rate": 0.01},
        eval={"engine": "generate", "max_new_tokens": 2},
    )
    train(run, **QUIET)
    evaluate_run(run.output, "test")
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of its folder without answers."""
    folder = shutil.copytree(trained.output, tmp_path / "run")
    for name in ("predictions", "metrics"):
        shutil.rmtree(folder / name)
    return folder


def results(folder: Path) -> dict[str, bytes]:
    """All predictions and scores, and partial answers if there are any."""
    return {path.name: path.read_bytes() for name in ("predictions", "metrics") for path in (folder / name).iterdir()}


@SAME_PREDICTIONS
def test_an_interrupted_evaluation_continues_and_ends_with_the_same_bytes(trained, run, monkeypatch):
    notes, expected = [], results(trained.output)
    for number, num_left in ((3, NUM_BATCHES), (4, 8)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_after(patch, number)
            evaluate_run(run, "test", notify=notes.append)
        assert not (run / "metrics").exists() and num_left
    asked = interrupt_after(monkeypatch, NEVER)
    evaluation, path = evaluate_run(run, "test", notify=notes.append)
    said = [note for note in notes if note.startswith("continuing an evaluation")]
    assert said == [f"continuing an evaluation: {number} of 87 questions were answered before" for number in (24, 56)]
    assert sum(asked) == 87 - 56 and evaluation.overall.num_questions == 87
    assert results(run) == expected and path == run / "predictions" / "test.jsonl"
    assert len({json.loads(line)["predicted"] for line in path.read_text().splitlines()}) > 1


@SAME_PREDICTIONS
def test_so_does_one_in_batches(trained, run, monkeypatch):
    """Although a batch is answered while the prompts of the next are computed."""
    settings = trained.eval.model_copy(update={"engine": "shared", "tokens_per_batch": 600})
    (run / "run.yaml").write_text(trained.model_copy(update={"eval": settings}).to_yaml())
    evaluate_run(run / "run.yaml", "test")
    expected, notes = results(run), []
    shutil.rmtree(run / "predictions")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        added = interrupt_after(patch, 3)
        evaluate_run(run / "run.yaml", "test")
    evaluate_run(run / "run.yaml", "test", notify=notes.append)
    assert f"continuing an evaluation: {sum(added)} of 87 questions were answered before" in notes
    assert results(run) == expected and sum(added) < 80


def test_an_evaluation_that_was_not_yet_saved_loads_no_model(trained, run, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lookonce.eval.answers.questions.write_predictions", Mock(side_effect=KeyboardInterrupt))
        evaluate_run(run, "test")
    monkeypatch.setattr("lookonce.eval.run.load_trained", pytest.fail)
    evaluate_run(run, "test")
    assert results(run) == results(trained.output)


@pytest.mark.parametrize("change", ["adapter", "questions", "max_new_tokens"])
def test_answers_to_other_questions_or_of_another_adapter_are_not_taken(trained, run, monkeypatch, tmp_path, change):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 3)
        evaluate_run(run, "test")
    changed = trained
    if change == "adapter":
        path = run / "adapter" / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
        look_trained(RunFolder(run))  # as if it had been trained again
    elif change == "questions":
        lines = Path(trained.data.test[0]).read_text().splitlines(keepends=True)
        (tmp_path / "test.jsonl").write_text("".join([*lines[:-1], lines[-1].replace("?", " now?")]))
        data = {"test": [tmp_path / "test.jsonl"], "image_root": Path(trained.data.test[0]).parent}
        changed = trained.model_copy(update={"data": trained.data.model_copy(update=data)})
    else:
        changed = trained.model_copy(update={"eval": trained.eval.model_copy(update={"max_new_tokens": 3})})
    (run / "run.yaml").write_text(changed.to_yaml())
    asked, notes = interrupt_after(monkeypatch, NEVER), []
    evaluate_run(run / "run.yaml", "test", notify=notes.append)
    assert not [note for note in notes if "continuing" in note]
    assert sum(asked) == 87 and not list(run.glob("predictions/*partial*"))


@SAME_PREDICTIONS
def test_ranks_share_the_questions_and_the_first_writes(trained, run, preloaded, monkeypatch):
    """Also those that are left of an evaluation by a single process."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 4)
        evaluate_run(run, "test")
    ranks = preloaded.start_ranks(2, SHOWING, "eval", str(run), "--split", "test", "--json", folder=run)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.error for rank in ranks]
    assert results(run) == results(trained.output)
    first, second = ranks
    assert json.loads(first.out)["overall"]["num_questions"] == 87 and second.out == ""
    numbers = [rank.error.count("answered a batch") for rank in ranks]
    assert sum(numbers) == NUM_BATCHES - 4 and abs(numbers[0] - numbers[1]) <= 1
    assert first.error.count("continuing an evaluation") == 1 and "continuing" not in second.error


SHOWING = """
import sys
from lookonce.eval.answers import engines
real = engines.greedy_answers
engines.BATCH_SIZE = 8

def shown(*arguments):
    print("answered a batch", file=sys.stderr)
    return real(*arguments)

engines.greedy_answers = shown
from lookonce.cli import main
main()
"""
