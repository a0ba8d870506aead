"""Questions in stages: later prompts have the model's own answers, those of the records, or none, side by side."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.answers import interrupt_after

from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.errors import UsageError
from lookonce.eval.answers.accuracy import Accuracy
from lookonce.eval.answers.engines import engine_of
from lookonce.eval.answers.questions import Questions
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.prediction import Prediction, read_predictions
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import FROM_CACHE, open_run
from lookonce.train.model.load import load_trained
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}
MAP = "datasets/kvasir-vqa.stages/reasoning.yaml"
EVERY = ("val-none", "val-reference", "val-shuffled", "val-untuned", "val")


@pytest.fixture(scope="module")
def trained(make_run_in, sample, built, root, tmp_path_factory) -> RunFile:
    """A run with contexts and answers. Its validation images have questions of all stages, the last ones first."""
    folder = tmp_path_factory.mktemp("staged")
    write_records(folder / "val.jsonl", read_records(sample / "val.jsonl")[::-1][:40], image_root=sample)
    run = make_run_in(
        folder,
        data={
            "val": str(folder / "val.jsonl"),
            "image_root": str(sample),
            "stage_map": str(root / MAP),
            "context": {"by": "stage", "order": [1, 2, 3]},
        },
        cache={"dir": str(built.folder.parent)},
        train={"steps": 40, "learning_rate": 0.01},
        eval={"max_new_tokens": 4, "tokens_per_batch": 400},
    )
    train(run, **QUIET)
    return run


@pytest.fixture(scope="module")
def run(trained) -> RunFile:
    return trained


@pytest.fixture(scope="module", params=["summary", "turns"])
def each(request, trained, tmp_path_factory) -> RunFile:
    """The run, or a copy that asks with turns; to train it with turns would take longer than all else."""
    if request.param == "summary":
        return trained
    folder = shutil.copytree(trained.output, tmp_path_factory.mktemp("turns") / "run")
    record = json.loads((folder / "run.json").read_text())
    record["run"]["data"]["context"]["form"] = "turns"
    record["run"]["output"] = str(folder)
    (folder / "run.json").write_text(json.dumps(record))
    evaluate_run(folder, **QUIET)
    return RunFolder(folder).read_run()


def rows(run: RunFile, name: str = "val") -> list[Prediction]:
    return read_predictions(run.output / "predictions" / f"{name}.jsonl")


def earlier(of: list[Prediction], row: Prediction, truly: bool) -> tuple[Turn, ...]:
    """The answers to the questions of earlier stages about the image of a row."""
    before = [one for one in of if one.image_keys == row.image_keys and str(one.stage) < str(row.stage)]
    ordered = sorted(before, key=lambda one: str(one.stage))
    return tuple(Turn(one.question, one.answer if truly else one.predicted) for one in ordered)


def by_hand(row: Prediction, form: str) -> Record:
    """A record with the prompt of a row as its turns."""
    images, own = tuple(map(Path, row.images)), Turn(row.question, row.answer)
    if form == "turns" or not row.context:
        return Record(images, (*row.context, own))
    known = "; ".join(f"{turn.question} {turn.answer}" for turn in row.context)
    return Record(images, (Turn(f"Known so far: {known}\n{row.question}", row.answer),))


@pytest.mark.guarantee(
    "With predicted answers as context, prompts contain the model's own answers, and the model answers "
    "them as it answers the same prompts written by hand."
)
def test_contexts_have_the_answers_of_earlier_stages_and_answers_are_those_to_prompts_written_by_hand(each):
    run, found = each, rows(each)
    assert {row.ended for row in found} == {"stop"} and {row.stage for row in found} == {"1", "2", "3"}
    assert [row.context for row in found] == [earlier(found, row, False) for row in found]
    assert {row.context_answers for row in found if row.context} == {"predicted"}
    assert any(row.context != earlier(found, row, True) for row in found), "an own answer is wrong"
    assert not list(run.output.glob("predictions/*partial*"))

    records = [by_hand(row, run.data.context.form) for row in found]
    session = open_run(run, FROM_CACHE)
    questions = Questions(session, "val").asking([(record, len(record.turns) - 1) for record in records])
    model = load_trained(session.model_folder, run, run.output / "adapter")
    [answers] = engine_of(session).stream(model, [questions.dialogues])
    assert [answer.text for [answer] in answers] == [row.predicted for row in found]


def test_the_exact_match_while_training_is_that_of_own_answers(run):
    session = open_run(run, FROM_CACHE)
    model = load_trained(session.model_folder, run, run.output / "adapter")
    found = rows(run)
    assert Accuracy(session)(model) == {
        "exact_match": sum(row.is_right for row in found) / len(found),
        "num_questions": len(found),
    }


def test_true_answers_and_none_stand_beside_the_own(run):
    beside, path = evaluate_run(run.output, baselines=("reference", "none"), **QUIET)
    assert path.stem == "val" and list(beside.baselines)[-2:] == ["reference", "none"]
    scored, path = evaluate_run(run.output, baselines="all", **QUIET)
    assert {name: scored.baselines[name] for name in beside.baselines} == beside.baselines
    assert sorted(one.stem for one in path.parent.iterdir()) == sorted(EVERY) and path.stem == "val"
    own, true, none = (rows(run, name) for name in ("val", "val-reference", "val-none"))
    assert [row.context for row in true] == [earlier(true, row, True) for row in true]
    assert {row.context_answers for row in true if row.context} == {"reference"}
    assert not any(row.context or row.context_answers for row in none)
    for name, of in (("reference", true), ("none", none)):
        assert scored.baselines[name].exact_match == sum(row.is_right for row in of) / len(of)
    first = [number for number, row in enumerate(own) if row.stage == "1"]
    assert [own[n].predicted for n in first] == [true[n].predicted for n in first] == [none[n].predicted for n in first]
    notes = []
    evaluate_run(run.output, baselines="all", notify=notes.append)
    assert [note for note in notes if "on disk" in note] == [
        f"{name}: the answers are on disk, and are used again"
        for name in ("val-untuned", "val-shuffled", "val-reference", "val-none", "val")
    ]
    assert rows(run) == own


@pytest.mark.guarantee(
    "With predicted answers as context, an evaluation that is interrupted in any stage ends with the same bytes."
)
def test_an_interrupted_evaluation_continues_in_its_stage_and_ends_with_the_same_bytes(run, monkeypatch):
    path = run.output / "predictions" / "val.jsonl"
    expected, said = path.read_bytes(), []
    for number in (1, 2, 1):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_after(patch, number)
            evaluate_run(run.output, notify=said.append)
    assert {one.name for one in path.parent.glob("*partial*")} >= {"val.partial-0.jsonl", "val-stage-2.partial-0.jsonl"}
    evaluate_run(run.output, notify=said.append)
    assert path.read_bytes() == expected and not list(path.parent.glob("*partial*"))
    assert sum("continuing an evaluation" in note for note in said) >= 4


def test_ranks_share_each_stage(trained, preloaded, monkeypatch):
    path = trained.output / "predictions" / "val.jsonl"
    evaluate_run(trained.output, **QUIET)
    expected = path.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(patch, 2)
        evaluate_run(trained.output, **QUIET)
    code = "from lookonce.cli import main; main()"
    ranks = preloaded.start_ranks(2, code, "eval", str(trained.output), folder=trained.output.parent)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.error for rank in ranks]
    assert path.read_bytes() == expected and not list(path.parent.glob("*partial*"))


def test_both_engines_have_the_same_contexts(run):
    own = rows(run)
    evaluate_run(run.output, assignments=["eval.engine=generate"], **QUIET)
    found = rows(run)
    assert [(row.predicted, row.context) for row in found] == [(row.predicted, row.context) for row in own]


def test_the_key_says_what_the_run_itself_answers(run):
    own = rows(run, "val-reference")
    evaluate_run(run.output, assignments=["eval.staged=reference"], **QUIET)
    assert [(row.predicted, row.context) for row in rows(run)] == [(row.predicted, row.context) for row in own]
    with pytest.raises(UsageError, match="`eval.staged` is reference, so these are the answers of the run itself"):
        evaluate_run(run.output, baselines=("reference",), assignments=["eval.staged=reference"], **QUIET)


@pytest.mark.guarantee(
    "Training with the answers of a predictions file equals training on records that have these answers in their texts."
)
def test_a_training_with_the_answers_of_a_file_is_that_of_records_written_by_hand(trained, make_run_in, tmp_path):
    """The file is another run's, which was trained on other images than it answered."""
    evaluate_run(trained.output, **QUIET)
    write_records(tmp_path / "by-hand.jsonl", [by_hand(row, "summary") for row in rows(trained)], absolute=True)
    answers = [trained.output / "predictions" / "val.jsonl"]
    context = trained.data.context.model_dump(mode="json") | {"answers": [str(path) for path in answers]}
    data = {"val": [], "test": [], "stage_map": str(trained.data.stage_map), "image_root": str(trained.data.image_root)}
    notes = {}
    for name, given in (
        ("file", data | {"train": str(trained.data.val[0]), "context": context}),
        ("hand", {"val": [], "test": [], "train": str(tmp_path / "by-hand.jsonl")}),
    ):
        run = make_run_in(tmp_path, data=given, cache={"dir": str(trained.cache.dir)}, output=str(tmp_path / name))
        notes[name] = []
        train(run, notify=notes[name].append)
    adapters = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in notes]
    assert all(torch.equal(adapters[1][key], value) for key, value in adapters[0].items())
    assert any("its model was trained on none of" in note for note in notes["file"])
