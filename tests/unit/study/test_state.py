"""What run folders say of a study: what is complete, and what belongs to an earlier study file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookonce.errors import UsageError
from lookonce.files import write_json
from lookonce.study.file import expand, read_study
from lookonce.study.run import find_jobs
from lookonce.study.state import StudyStatus, find_mixed, find_outdated, in_order, read_state, refuse_outdated

STUDY = Path("study.yaml")
LATER = {"starts_from": "plain", "train.steps": 2}
VARIANTS = {"last": {"starts_from": "later"}, "later": LATER, "plain": None, "own": None}


def runs_of(path):
    return expand(read_study(path))


@pytest.fixture
def trained(write_study, look_trained):
    runs = runs_of(write_study(VARIANTS, seeds=[1]))
    for one in in_order(runs):
        look_trained(one)
    return runs


def test_a_change_touches_the_runs_of_its_variant_and_those_that_start_from_them(trained, write_study):
    names = [one.name for one in in_order(trained)]
    assert sorted(names) == sorted(trained) and names.index("plain-1") < names.index("later-1") < names.index("last-1")
    assert find_outdated(trained) == {} and refuse_outdated(trained, again=False, study=STUDY) == set()
    changed = runs_of(write_study(VARIANTS | {"later": LATER | {"train.steps": 3}}, seeds=[1]))
    assert find_outdated(changed) == {
        "later-1": "run.train.steps: now 3, trained with 2",
        "last-1": "starts from later-1, which is outdated",
    }
    with pytest.raises(UsageError, match=r"(?s)\n  later-1: run.train.steps: now 3, .*study.yaml --again$"):
        refuse_outdated(changed, again=False, study=STUDY)
    assert refuse_outdated(changed, again=True, study=STUDY) == {"later-1", "last-1"}
    jobs = {job.name: job for job in find_jobs(changed, {"later-1", "last-1"})}
    assert jobs["later-1"].command[1] == "--restart" and jobs["plain-1"].command[1] == "--resume"
    assert jobs["last-1"].after == ("cache of plain-1", "later-1")


def test_a_run_that_starts_from_one_that_was_trained_again_is_outdated(trained):
    (trained["plain-1"].folder.adapter / "adapter_model.safetensors").write_text("other weights")
    assert list(find_outdated(trained)) == ["later-1", "last-1"]
    assert "inputs.start: now" in find_outdated(trained)["later-1"]
    trained["plain-1"].folder.trained.unlink()
    assert find_outdated(trained)["later-1"] == "starts from plain-1, which is not trained any more"


def test_runs_that_were_trained_on_different_records_of_one_name_are_named(trained, write_study):
    """Also if the settings are the same: records were added to the file, and another variant to the study."""
    assert find_mixed(trained) == []
    for name, hashed in (("plain-1", "a"), ("later-1", "a"), ("last-1", "a"), ("own-1", "b")):
        record = trained[name].folder.folder / "run.json"
        values = json.loads(record.read_text())
        write_json(record, values | {"inputs": values["inputs"] | {"records": {"train": hashed}}})
    [sentence] = find_mixed(trained)
    assert sentence.startswith("not trained on the same records, ") and sentence.endswith("; own-1")
    path = write_study(VARIANTS, seeds=[1])
    assert sentence in StudyStatus.read(path).text() and StudyStatus.read(path).to_json()["mixed"] == [sentence]
    write_study(VARIANTS | {"own": {"data.where": {"share": 0.5}}}, seeds=[1])
    assert find_mixed(runs_of(path)) == []


def test_a_run_is_complete_when_its_split_is_evaluated(trained):
    one = trained["plain-1"]
    assert read_state(one).training.state == "trained" and not read_state(one).is_complete
    write_json(one.folder.folder / "summary.json", {})
    assert not read_state(one).is_complete
    assert [job.command[0] for job in find_jobs({one.name: one}, set())] == ["cache", "eval"]
    write_json(one.folder.metrics("val"), {"overall": {"num_questions": 4, "exact_match": 0.5, "majority": 0.25}})
    assert read_state(one).is_complete and find_jobs({one.name: one}, set()) == []


def test_the_table_names_outdated_runs(trained, write_study):
    del trained
    status = StudyStatus.read(write_study({"plain": None, "own": {"train.steps": 9}}, seeds=[1]))
    text = status.text()
    assert "own-1 is outdated: run.train.steps: now 9, trained with 4" in text and "0 of 2 runs complete" in text
