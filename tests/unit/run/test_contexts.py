"""The key `data.context`: what it does to a run's records, notes and identity."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lookonce.datasets.records import Record
from lookonce.errors import RecordsError, RunFolderError
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import TO_LOOK, OpenRun, open_run
from lookonce.run.records import check_paths

REASONING = "datasets/kvasir-vqa.stages/reasoning.yaml"
CONTEXT = {"by": "stage", "order": [1, 2, 3]}


@pytest.fixture
def staged(make_cached_run, root):
    """Makes runs on the sample with the stages of Kvasir-VQA."""

    def make(data=(), **changes) -> RunFile:
        return make_cached_run(data={"stage_map": str(root / REASONING)} | dict(data), **changes)

    return make


def identity(run):
    return open_run(run, TO_LOOK).records_identity()


def test_training_and_validation_records_get_a_context_and_their_questions_stay(staged, tmp_path):
    """What a record is asked does not change."""
    plain = open_run(staged(), TO_LOOK)
    found = open_run(staged({"context": CONTEXT}), replace(TO_LOOK, records="used"))
    assert [one.turns for one in found.all_records()] == [one.turns for one in plain.all_records()]
    assert all(one.context is None for one in found.records["test"])
    num_known = sum(one.context is not None for one in found.records["train"])
    assert 0 < num_known < len(found.records["train"]) and any(one.context for one in found.records["val"])
    assert found.notes[0].startswith(f"`data.context`: {num_known} of {len(found.records['train'])} train records have")


def test_the_answers_of_a_context_are_part_of_the_identity_and_their_path_is_not(staged, tmp_path):
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, text in zip(paths, ("{}", "{}", "{} "), strict=True):
        path.write_text(text)
    first, copy, other = (staged({"context": CONTEXT | {"answers": str(path)}}) for path in paths)
    assert "context" not in identity(staged())
    assert identity(first) == identity(copy) != identity(other)
    folder = RunFolder(first.output)
    folder.claim(first, identity(first))
    folder.log.touch()
    folder.check(copy, identity(copy))
    for changed, named in ((other, "inputs.answers"), (staged({"context": CONTEXT}), "inputs.answers")):
        with pytest.raises(RunFolderError, match=named):
            folder.check(changed, identity(changed))
    with pytest.raises(RunFolderError, match="run.data.context.form"):
        folder.check(staged({"context": CONTEXT | {"answers": str(paths[0]), "form": "turns"}}), identity(first))
    later = staged({"context": CONTEXT | {"answers": "/nowhere.jsonl"}})
    check_paths(later)
    assert identity(later)["answers"] is None, "a cache is built, and a status shown, before another run has answered"
    with pytest.raises(RecordsError, match="no predictions at /nowhere.jsonl"):
        open_run(later, replace(TO_LOOK, records="used"))


def rows_of(opened: OpenRun, records: list[Record]) -> str:
    """Predictions of all questions of some records, as lines."""
    rows = (
        {"question": turn.question, "predicted": "own", "image_keys": opened.images.keys_of(record)}
        for record in records
        for turn in record.turns
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.guarantee(
    "A run whose contexts have the answers of a predictions file names the images that the model of these "
    "answers was trained on."
)
def test_it_is_said_which_images_the_models_were_trained_on_whose_answers_contexts_have(staged, sample, tmp_path):
    """Two models that were trained on other images than they answered; and one that answered its own."""
    plain = open_run(staged(), TO_LOOK)
    folds = []
    for name, trained in (("a", "test"), ("b", "train")):
        fold = staged({"train": str(sample / f"{trained}.jsonl")}, output=str(tmp_path / name))
        RunFolder(fold.output).claim(fold, {})
        path = RunFolder(fold.output).predictions("other")
        path.parent.mkdir()
        path.write_text(rows_of(plain, plain.records["train"] if name == "a" else plain.records["val"]))
        folds.append(str(path))
    found = open_run(staged({"context": CONTEXT | {"answers": folds}}), replace(TO_LOOK, records="used"))
    assert {turn.answer for record in found.all_records() for turn in record.known} == {"own"}
    shown = {key for record in found.records["train"] if record.context for key in found.images.keys_of(record)}
    of = f"{len(shown)} images for which prompts have its answers"
    assert found.notes[-1] == f"{folds[0]}: its model was trained on none of {of}"

    RunFolder(tmp_path / "b").predictions("other").write_text(rows_of(plain, [*plain.all_records()]))
    own = open_run(staged({"context": CONTEXT | {"answers": folds[1]}}), replace(TO_LOOK, records="used"))
    assert own.notes[-1].startswith(f"{folds[1]}: its model was trained on {len(shown)} of {len(shown)} images for")
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(RunFolder(tmp_path / "b").predictions("other").read_bytes())
    moved = open_run(staged({"context": CONTEXT | {"answers": str(copy)}}), replace(TO_LOOK, records="used"))
    assert moved.notes[-1] == f"{copy} is not in a run folder, so it is unknown which images its model was trained on"
