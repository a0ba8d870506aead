"""A study on the sample with stages: answers of models that did not see the images, a variant that is not trained, a
sequence, a route, and the report.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file

from lookonce.datasets.context import as_shown
from lookonce.datasets.sample.write import write_sample
from lookonce.eval.scores.prediction import read_predictions
from lookonce.run.folder import RunFolder
from lookonce.run.open import TO_LOOK, open_run
from lookonce.run.records import HELD_OUT

CONTEXT = {"by": "stage", "order": [1, 2, 3]}
VARIANTS = {
    "half-1": {"data.held_out": {"fold": 1, "of": 2}},
    "half-2": {"data.held_out": {"fold": 2, "of": 2}},
    "own": {"answers_of": ["half-1", "half-2"], "data.context": CONTEXT},
    "asked": {"starts_from": "half-1", "train.epochs": 0, "train.steps": None, "data.context": CONTEXT},
    "one": {"data.where": {"stage": 1}},
    "later": {"starts_from": "one", "data.where": {"stage": [2, 3]}},
    "routed": {"route": {"by": "stage", "variants": {1: "one", 2: "later", 3: "later"}}},
}


@pytest.fixture
def study(study_of, make_run, tmp_path):
    folder = tmp_path / "stages"
    write_sample(folder, num_images=8, stages=True)
    data = {split: str(folder / f"{split}.jsonl") for split in ("train", "val", "test")}
    cache = {"dir": str(tmp_path / "caches")}
    run = make_run(model={"path": str(folder / "model")}, data=data, cache=cache, train={"steps": 2})
    return study_of(run.model_copy(update={"eval": run.eval.model_copy(update={"split": "test"})}).to_yaml())


@pytest.mark.guarantee(
    "A variant with zero epochs has the weights of the adapter it starts from, and gives the answers of that adapter."
)
@pytest.mark.guarantee("No context has an answer from a model that was trained on the image.")
@pytest.mark.guarantee("Routed predictions are those of each adapter alone, question by question.")
def test_contexts_are_of_models_that_did_not_see_the_image_and_adapters_are_asked_alone_and_routed(study):
    output = study.write("staged", VARIANTS, baseline="half-1")
    said = json.loads(study("run", "staged.yaml", "--json"))
    assert len(said["runs"]) == 6 and all(one["is_complete"] and not one["not_asked"] for one in said["runs"])
    assert [one["answers_of"] for one in said["runs"]][:4] == [[], [], ["half-1-1", "half-2-1"], []]
    assert said["routed"][0]["runs"] == {"1": "one-1", "2": "later-1", "3": "later-1"}
    folders = {variant: RunFolder(output / f"{variant}-1") for variant in VARIANTS}

    answers, records = {}, 0
    for half in (folders["half-1"], folders["half-2"]):
        opened = open_run(half.read_run(), replace(TO_LOOK, records="used"))
        trained_on = {key for record in opened.records["train"] for key in opened.images.keys_of(record)}
        for row in read_predictions(half.predictions(HELD_OUT)):
            assert trained_on.isdisjoint(row.image_keys)
            answers[row.image_keys, row.question] = as_shown(row.predicted, row.ended)
        records += len(opened.records["train"])
    opened = open_run(folders["own"].read_run(), replace(TO_LOOK, records="used"))
    assert records == len(opened.records["train"])
    for record in opened.records["train"]:
        keys = opened.images.keys_of(record)
        assert all(turn.answer == answers[keys, turn.question] for turn in record.known)
    assert all(any(record.known for record in opened.records[split]) for split in ("train", "val"))
    log = (output / "logs" / "own-1.log").read_text()
    assert "its model was trained on none of" in log and "cross-fit them" not in log

    one, other = (load_file(folders[variant].adapter / "adapter_model.safetensors") for variant in ("half-1", "asked"))
    assert one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)
    assert (folders["asked"].read_trained().num_steps, folders["asked"].read_trained().num_samples) == (0, 0)
    log = (output / "logs" / "asked-1.log").read_text()
    assert f"nothing is trained: the adapter of {folders['half-1'].folder}" in log
    tested = {variant: read_predictions(folder.predictions("test")) for variant, folder in folders.items()}
    assert all(row.context_answers == (None if row.stage == "1" else "predicted") for row in tested["asked"])
    firsts = [[row.predicted for row in tested[name] if row.stage == "1"] for name in ("half-1", "asked")]
    assert firsts[0] == firsts[1] != []
    alone = zip(tested["one"], tested["later"], strict=True)
    assert tested["routed"] == [first if first.stage == "1" else later for first, later in alone]
    assert {row.stage for row in tested["routed"]} == {"1", "2", "3"}

    report = json.loads(study("report", "staged.yaml", "--json"))
    assert [variant["variant"] for variant in report["variants"]] == list(VARIANTS)
    assert [one["variants"] for one in report["forgetting"]] == [["one", "later"]]
    [contexts] = [one for one in report["contexts"] if one["name"] == "own"]
    for kind, name in (("predicted", "test"), ("reference", "test-reference"), ("none", "test-none")):
        rows = read_predictions(folders["own"].predictions(name))
        share = contexts["exact_match"][kind]["all"]["value"]
        assert share == pytest.approx(sum(row.is_right for row in rows) / len(rows))
        assert {row.context_answers for row in rows if row.context} == ({kind} if kind != "none" else set())
    assert (output / "report.html").exists()
