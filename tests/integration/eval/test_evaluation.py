"""Evaluations of a trained run: the answers of training, held-out questions, baselines; only on the trained model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.answers import interrupt_after

from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.errors import RunFolderError, UsageError
from lookonce.eval import run as evaluation
from lookonce.eval.answers.files import AnsweringCost
from lookonce.eval.answers.questions import Questions, questions_for
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.metrics import BASELINES
from lookonce.eval.scores.prediction import read_predictions
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import FROM_CACHE, TO_BUILD, open_run
from lookonce.run.records import HELD_OUT
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}


@pytest.mark.guarantee("Training and `lookonce eval` give the same answers, in bf16 too.")
def test_in_bfloat16_with_trained_embeddings_train_and_eval_give_the_same_answers(make_cached_run):
    run = make_cached_run(train={"steps": 8, "precision": "bf16"}, lora={"modules_to_save": ["embed_tokens"]})
    train(run, **QUIET)
    predictions = run.output / "predictions" / "val.jsonl"
    before = predictions.read_text()
    rows = read_predictions(predictions)
    assert all(len(row.image_keys) == len(row.images) == 1 and row.source for row in rows)
    assert AnsweringCost.read(run.output / "answering" / "val.json").num_answered == len(rows)
    evaluate_run(run.output)
    assert predictions.read_text() == before


def test_an_adapter_is_not_evaluated_on_another_model(make_cached_run, sample, tmp_path):
    shutil.copytree(sample / "model", tmp_path / "model")
    run = make_cached_run(model={"path": str(tmp_path / "model")}, train={"steps": 1})
    train(run, **QUIET)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name] * 0}, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for again in (lambda: evaluate_run(run.output), lambda: train(run, resume=True, notify=print)):
        with pytest.raises(RunFolderError, match="model"):
            again()


def test_other_questions_may_be_asked_of_a_trained_run(make_cached_run, sample, tmp_path):
    lines = (sample / "test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "test.jsonl").write_text("".join(lines))
    data = {"test": str(tmp_path / "test.jsonl"), "image_root": str(sample)}
    run = make_cached_run(data=data, train={"steps": 1})
    train(run, **QUIET)
    (tmp_path / "test.jsonl").write_text("".join(lines[:3]))
    assert evaluate_run(run.output, "test")[0].overall.num_questions == 3
    assert train(run, resume=True, **QUIET).num_steps == 1


def test_held_out_questions_are_answered_when_training_ends_and_only_while_the_records_are_the_same(
    trainings, make_run, tmp_path
):
    options = trainings.options("shared", steps=1)
    records = tmp_path / "records.jsonl"
    shutil.copy(options["data"]["train"], records)
    options["data"] |= {"train": str(records), "held_out": {"fold": 1, "of": 2}}
    run = make_run(**options)
    train(run, notify=lambda note: None)
    folder = RunFolder(run.output)
    first = folder.predictions(HELD_OUT).read_bytes()
    assert 0 < len(read_predictions(folder.predictions(HELD_OUT))) < len(records.read_text().splitlines())
    assert len(read_predictions(folder.predictions("val"))) == trainings.num_validated
    evaluate_run(run.output, HELD_OUT)
    assert folder.predictions(HELD_OUT).read_bytes() == first
    (folder.folder / "summary.json").unlink()  # as if it had been killed while it answered
    notes = []
    train(run, resume=True, notify=notes.append)
    assert f"{HELD_OUT}: the answers are on disk, and are used again" in notes

    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[len(lines) // 2 :]))
    with pytest.raises(RunFolderError, match=r"have changed since training \(records.train\)"):
        evaluate_run(run.output, HELD_OUT)
    evaluate_run(run.output, "val")

    with pytest.raises(UsageError, match="no held-out records: `data.held_out` leaves no training record out"):
        evaluate_run(trainings.uninterrupted("shared").output, HELD_OUT)


NAMES = ["val-untuned", "val-shuffled"]


@pytest.fixture(scope="module")
def run(make_run_in, sample, tmp_path_factory) -> RunFile:
    """A run with a built cache. Its adapter changes all answers, and its validation records have a conversation."""
    folder = tmp_path_factory.mktemp("baselines")
    asked = read_records(sample / "val.jsonl")[:12]
    several = Record(asked[0].images, (*asked[0].turns, Turn("Is there text?", "no")))
    write_records(folder / "val.jsonl", [*asked, several], image_root=sample)
    data = {"val": str(folder / "val.jsonl"), "test": [], "image_root": str(sample)}
    run = make_run_in(
        folder,
        data=data,
        train={"steps": 6, "learning_rate": 0.01},
        lora={"modules_to_save": ["embed_tokens"]},
        eval={"tokens_per_batch": 80, "max_new_tokens": 2},
    )
    open_run(run, TO_BUILD).build()
    (folder / "run.yaml").write_text(run.to_yaml())
    return run


def files(folder: Path, *parts: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for part in parts for path in (folder / part).iterdir()}


def predicted(folder: Path, name: str) -> list[str]:
    return [row.predicted for row in read_predictions(folder / "predictions" / f"{name}.jsonl")]


@pytest.mark.guarantee(
    "A trained model whose adapter is switched off gives the untuned model's answers, and baselines are answered once."
)
def test_baselines_before_and_after_the_training(run, monkeypatch):
    """All in one test, since each part needs what the one before has written."""
    folder, run_file, loaded = run.output, run.output.parent / "run.yaml", []
    with pytest.raises(RunFolderError, match="is not a run folder"):
        evaluate_run(run_file)
    untuned, path = evaluate_run(run_file, baselines=("untuned",), **QUIET)
    assert path.name == "val-untuned.jsonl" and list(untuned.baselines) == ["majority"]
    with pytest.raises(RunFolderError, match="no trained adapter"):
        evaluate_run(run_file, baselines="all")

    train(run, **QUIET)
    found = json.loads((folder / "metrics" / "val.json").read_text())["baselines"]
    assert list(found) == ["majority", "untuned"]
    own, cached = files(folder, "predictions"), set(run.cache.dir.glob("*/shards/*"))

    real = evaluation.load_trained
    monkeypatch.setattr(evaluation, "load_trained", lambda *given: loaded.append(1) or real(*given))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 2)
        evaluate_run(folder, baselines="all", **QUIET)
    notes = []
    scored, _ = evaluate_run(folder, baselines="all", notify=notes.append)
    first, second, third = [note for note in notes if "answer" in note]
    assert (first, third) == tuple(
        f"{name}: the answers are on disk, and are used again" for name in ("val-untuned", "val")
    )
    assert re.fullmatch(rf"continuing an evaluation: [2-9] of {len(scored.predictions)} questions .*", second)
    assert len(loaded) == 2  # before the interruption and after it
    rows = files(folder, "predictions")
    assert sorted(rows) == sorted(f"{name}.jsonl" for name in ("val", *NAMES)) and rows.items() >= own.items()
    assert set(run.cache.dir.glob("*/shards/*")) == cached

    assert list(scored.baselines) == ["majority", "untuned", "shuffled"]
    for name in NAMES:
        [one] = (scored.baselines[key] for key in scored.baselines if name.endswith(key))
        overall = json.loads((folder / "metrics" / f"{name}.json").read_text())["overall"]
        assert one.exact_match == overall["exact_match"]
        assert one.difference == pytest.approx(scored.overall.exact_match - one.exact_match)
        assert predicted(folder, name) != predicted(folder, "val")

    (folder / "predictions" / "val-untuned.jsonl").unlink()
    evaluate_run(folder, baselines="all", **QUIET)
    assert files(folder, "predictions") == rows, "with the adapter switched off the model is the untuned one"

    num_loaded = len(loaded)
    evaluate_run(folder, baselines="all", **QUIET)
    assert len(loaded) == num_loaded
    changed = run.model_copy(update={"eval": run.eval.model_copy(update={"max_new_tokens": 1})})
    run_file.write_text(changed.to_yaml())
    evaluate_run(run_file, baselines="all", **QUIET)
    assert len(loaded) == num_loaded + 1 and max(len(text.split()) for text in predicted(folder, "val-shuffled")) == 1


def test_each_baseline_has_an_engine_of_its_own(run):
    """An engine keeps passes that were recorded with the adapter."""
    questions = Questions.of(open_run(run, FROM_CACHE), "val")
    engines = [questions_for(questions, baseline).engine for baseline in (None, *BASELINES)]
    assert len(set(map(id, engines))) == len(engines)
