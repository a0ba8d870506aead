"""A study of stages on the sample with stages: a chain, an adapter for each stage with a route, earlier answers in
prompts, and the report.
"""

from __future__ import annotations

import json

import pytest

from lookonce.datasets.sample.write import write_sample
from lookonce.eval.scores.prediction import read_predictions
from lookonce.run.folder import RunFolder

ARMS = {
    "staged": {
        "batch.order": {"by": "stage", "stages": [1, 2, 3]},
        "data.context": {"by": "stage", "order": [1, 2, 3]},
    },
    "one": {"data.where": {"stage": 1}},
    "later": {"starts_from": "one", "data.where": {"stage": [2, 3]}},
    "routed": {"route": {"by": "stage", "arms": {1: "one", 2: "later", 3: "later"}}},
}


@pytest.fixture
def study(study_of, make_run, tmp_path):
    write_sample(tmp_path / "stages", num_images=8, stages=True)
    folder = tmp_path / "stages"
    data = {"train": str(folder / "train.jsonl"), "val": [], "test": str(folder / "test.jsonl")}
    cache = {"dir": str(tmp_path / "caches")}
    run = make_run(model={"path": str(folder / "model")}, data=data, cache=cache, train={"steps": 3})
    return study_of(run.model_copy(update={"eval": run.eval.model_copy(update={"split": "test"})}).to_yaml())


@pytest.mark.guarantee("Routed predictions are those of each adapter alone, question by question.")
def test_routed_arms_chains_and_arms_with_context_are_answered_and_reported(study):
    output = study.write("staged", ARMS, "staged")
    said = json.loads(study("run", "staged.yaml", "--json"))
    assert len(said["runs"]) == 3 and all(one["is_complete"] and not one["not_asked"] for one in said["runs"])
    assert "staged-1-contexts" in said["done"]
    assert said["routed"][0]["runs"] == {"1": "one-1", "2": "later-1", "3": "later-1"}
    routed, one, later = (
        read_predictions(RunFolder(output / f"{arm}-1").predictions("test")) for arm in ("routed", "one", "later")
    )
    assert {row.stage for row in routed} == {"1", "2", "3"}
    assert routed == [one[place] if row.stage == "1" else later[place] for place, row in enumerate(routed)]
    report = json.loads(study("report", "staged.yaml", "--json"))
    assert [arm["arm"] for arm in report["arms"]] == list(ARMS)
    assert report["forgetting"][0]["arms"] == ["one", "later"]
    [contexts] = report["contexts"]
    shares = {kind: found["all"]["value"] for kind, found in contexts["exact_match"].items()}
    folder = RunFolder(output / "staged-1")
    for kind, name in (("own", "test"), ("true", "test-true"), ("none", "test-none")):
        rows = read_predictions(folder.predictions(name))
        assert shares[kind] == pytest.approx(sum(row.is_right for row in rows) / len(rows))
        assert {row.context_answers for row in rows if row.context} == ({kind} if kind != "none" else set())
    names = ("arms", "questions", "stages", "contexts-staged", "forgetting-later")
    tables = [f"report-{name}.{kind}" for name in names for kind in ("csv", "tex")]
    written = ["report.html", "report-methods.tex", *tables]
    assert sorted(path.name for path in output.glob("report*")) == sorted(written)
