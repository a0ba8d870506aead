"""The keys that select and order training records: what they do to a run's records, notes and identity."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from lookonce.errors import RecordsError, RunFolderError, UsageError
from lookonce.run.config import read_run_file
from lookonce.run.folder import RunFolder
from lookonce.run.open import TO_LOOK, open_run
from lookonce.run.records import check_paths, read_splits
from lookonce.status import RunStatus

REASONING = "datasets/kvasir-vqa.stages/reasoning.yaml"
BY_STAGE = {"order": {"by": "stage", "stages": [1, 2, 3]}}


@pytest.fixture
def staged(make_cached_run, root):
    """Makes runs on the sample with the stages of Kvasir-VQA."""

    def make(data=(), **changes):
        return make_cached_run(data={"stage_map": str(root / REASONING)} | dict(data), **changes)

    return make


def identity(run):
    return open_run(run, TO_LOOK).records_identity()


def stages(records) -> Counter[int]:
    return Counter(record.metadata["stage"] for record in records)


def test_where_and_replay_select_training_records_alone(staged):
    notes = []
    everything = read_splits(staged())
    found = read_splits(staged({"where": {"stage": 2}, "replay": {"stage": 1, "share": 0.1}}), notes.append)
    whole = stages(everything["train"])
    assert stages(found["train"]) == {2: whole[2], 1: round(0.1 * whole[1])}
    assert [note.partition(":")[0] for note in notes] == [
        f"`data.where` leaves out {whole[1] + whole[3]} of {whole.total()} train records",
        f"`data.replay` trains on {round(0.1 * whole[1])} of them",
    ]
    assert (found["val"], found["test"]) == (everything["val"], everything["test"]) and whole.keys() == {1, 2, 3}


def test_a_share_follows_from_the_seed_of_the_training(staged):
    def origins(share, seed):
        run = staged({"where": {"share": share}}, train={"seed": seed})
        return {record.origin for record in read_splits(run)["train"]}

    assert origins(0.384, 1) < origins(0.694, 1) and origins(0.384, 1) != origins(0.384, 2)


def test_status_shows_what_is_left_out_and_in_which_order_an_epoch_goes(staged):
    run = staged({"where": {"stage": [1, 3]}}, batch=BY_STAGE)
    number = stages(read_splits(staged())["train"])
    assert RunStatus.open(run).read().notes[:2] == [
        f"`data.where` leaves out {number[2]} of {number.total()} train records: stage 2 ({number[2]})",
        f"each epoch trains on stage 1 ({number[1]}), then stage 2 (0), then stage 3 ({number[3]})",
    ]


def test_a_record_that_is_in_no_stage_is_found_when_records_are_read(staged):
    with pytest.raises(RecordsError, match=r"`batch.order`: \d+ of \d+ train records are not in one stage: stage 3"):
        read_splits(staged(batch={"order": {"by": "stage", "stages": [1, 2]}}))


def test_a_run_with_other_records_or_another_selection_is_refused(staged):
    run = staged({"where": {"stage": [1]}})
    folder = RunFolder(run.output)
    folder.claim(run, identity(run))
    folder.log.touch()
    folder.check(staged({"where": {"stage": 1}}), identity(run))
    other = staged({"where": {"stage": 1, "share": 0.5}})
    with pytest.raises(RunFolderError, match=r"(?s)inputs.records.train.*run.data.where.share"):
        folder.check(other, identity(other))


def test_stages_are_part_of_the_identity_because_a_stage_map_can_change(staged, tmp_path, root):
    """The map's content is compared and its path is not, as with records."""
    assert "stages" not in identity(staged())
    before = identity(staged(batch=BY_STAGE))
    copy = tmp_path / "map.yaml"
    copy.write_text((root / REASONING).read_text())
    moved = staged({"stage_map": str(copy)}, batch=BY_STAGE)
    assert identity(moved) == before
    copy.write_text(copy.read_text().replace("stage: 3", "stage: 2"))
    after = identity(moved)
    assert after["records"] == before["records"] and after["stages"] != before["stages"]
    folder = RunFolder(moved.output)
    folder.claim(staged(batch=BY_STAGE), before)
    folder.log.touch()
    folder.check(moved, before)
    with pytest.raises(RunFolderError, match="inputs.stages"):
        folder.check(moved, after)


def test_a_missing_stage_map_is_found_before_anything_is_read(staged):
    with pytest.raises(UsageError, match="cannot read the stage map /nowhere.yaml: .*; correct `data.stage_map`"):
        check_paths(staged({"stage_map": "/nowhere.yaml"}))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("data.replay={stage: 1}", "`replay` selects from the records that `where` leaves out, and needs `where`"),
        ("data.where={share: 2}", r"data.where.share: .* less than or equal to 1 \(got 2\)"),
        ("data.where={stage: {a: 1}}", r"data.where.stage\[0\]: must be a text, a number, true or false"),
        ("data.where={stage: []}", "data.where.stage: Value should have at least 1 item"),
        ("data.context={by: stage}", "data.context.order: is missing"),
        ("data.context={by: stage, order: [1, 2], each: x}", "data.context.each: .*must have {answer}"),
        ("batch.order=sorted", r"batch.order.name: Input should be 'random' or 'as_given' \(got 'sorted'\)"),
        ("batch.order={by: stage}", "wrong:\n  batch.order.mapping.stages: is missing$"),
        ("batch.order={by: stage, stages: [1, '1']}", "stages: has 1 twice; write each value once"),
    ],
)
def test_wrong_values_are_refused(tmp_path, assignment, message):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "output": "x"}))
    with pytest.raises(UsageError, match=message):
        read_run_file(path, [assignment])
