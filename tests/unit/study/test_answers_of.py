"""Variants whose prompts have the answers of other variants, which were trained on other images."""

from __future__ import annotations

import pytest

from lookonce.errors import UsageError
from lookonce.run.records import HELD_OUT
from lookonce.study.file import expand, read_study
from lookonce.study.run import find_jobs
from lookonce.study.state import find_outdated, in_order

STAGE_MAP = "datasets/kvasir-vqa.stages/reasoning.yaml"
CONTEXT = {"data.stage_map": STAGE_MAP, "data.context": {"by": "stage", "order": [1, 2, 3]}}
VARIANTS = {
    "own": {"answers_of": ["half-1", "half-2"], **CONTEXT},
    "half-1": {"data.held_out": {"fold": 1, "of": 2}},
    "half-2": {"data.held_out": {"fold": 2, "of": 2}},
    "true": CONTEXT,
}


@pytest.fixture
def runs(write_study):
    return expand(read_study(write_study(VARIANTS, seeds=[1, 2])))


def test_contexts_have_the_answers_of_the_same_seed(runs, tmp_path):
    study = tmp_path / "study"
    of_val, held_out = study / "half-1-2" / "predictions" / "val.jsonl", f"predictions/{HELD_OUT}.jsonl"
    given = [study / "half-1-2" / held_out, study / "half-2-2" / held_out, of_val]
    assert runs["own-2"].settings.data.context.prediction_files == given and runs["own-2"].needs == (
        "half-1-2",
        "half-2-2",
    )
    assert runs["true-2"].settings.data.context.prediction_files == []


def test_without_validation_records_no_answers_to_them_are_needed(write_study):
    for variants in ({**VARIANTS, "own": VARIANTS["own"] | {"data.val": []}}, VARIANTS):
        base = {} if "data.val" in variants["own"] else {"data": {"val": []}}
        found = expand(read_study(write_study(variants, base)))["own-42"].settings.data.context.prediction_files
        assert [path.stem for path in found] == [HELD_OUT, HELD_OUT]


def test_a_run_waits_for_the_answers_in_its_prompts(runs):
    jobs = {job.name: job for job in find_jobs(runs, set())}
    assert {"half-1-2", "half-2-2"} <= set(jobs["own-2"].after) and "half-1-1" not in jobs["own-2"].after


def test_a_run_with_other_answers_than_it_was_trained_with_is_outdated(runs, look_trained, write_study):
    for one in in_order(runs):
        look_trained(one)
        if one.settings.data.held_out:
            for split in (HELD_OUT, "val"):
                one.folder.predictions(split).parent.mkdir(exist_ok=True)
                one.folder.predictions(split).write_text(f"{one.name} {split}")
    assert find_outdated(runs) == {}
    first = runs["half-1-1"].folder
    first.predictions(HELD_OUT).write_text("other answers")
    assert list(find_outdated(runs)) == ["own-1"] and find_outdated(runs)["own-1"].startswith("inputs.answers: now")
    first.trained.unlink()
    assert find_outdated(runs) == {"own-1": "has the answers of half-1-1, which is not trained any more"}
    changed = VARIANTS | {"half-2": VARIANTS["half-2"] | {"train.steps": 9}}
    found = find_outdated(expand(read_study(write_study(changed, seeds=[1, 2]))))
    assert found["own-2"] == "has the answers of half-2-2, which is outdated" and "true-2" not in found
    true = expand(read_study(write_study(VARIANTS | {"own": CONTEXT}, seeds=[2])))
    assert find_outdated(true)["own-2"].startswith("inputs.answers: now None, trained with")


@pytest.mark.parametrize(
    ("variants", "found"),
    [
        ({"half-2": None}, "half-1: 1 of 2, half-2: none"),
        ({"own": {"answers_of": ["half-1", "half-1"], **CONTEXT}}, "half-1: 1 of 2"),
    ],
)
def test_variants_that_do_not_leave_out_each_fold_once_are_refused(write_study, variants, found):
    with pytest.raises(
        UsageError, match=f"variant own: answers_of needs a variant for each fold .*, and names {found}; give"
    ):
        expand(read_study(write_study(VARIANTS | variants)))
