"""Selections: by metadata and by share, counted and named, nested, and the same for the same seed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.datasets.curriculum import Selection, select_training
from lookonce.datasets.formats.record import Record, Turn
from lookonce.errors import RecordsError

FEW = settings(max_examples=50)
STAGES = st.lists(st.sampled_from([1, 2, "3", None]), min_size=1, max_size=40)
SHARES = st.floats(0.01, 1)


def records_of(stages: list[object]) -> list[Record]:
    """A record of each of these stages; None is a record without one."""
    return [
        Record((), (Turn("q", "a"),), metadata={} if stage is None else {"stage": stage}, origin=str(number))
        for number, stage in enumerate(stages)
    ]


def select(stages, where, replay=None, seed=0, notify=lambda note: None) -> list[int]:
    """The positions of the records that are trained on."""
    where = Selection.model_validate(where)
    replay = replay and Selection.model_validate(replay)
    return [int(record.origin) for record in select_training(records_of(stages), where, replay, seed, notify)]


@pytest.mark.parametrize(
    ("where", "selected"),
    [
        ({"stage": 1}, [0, 4]),
        ({"stage": [3, 1]}, [0, 2, 4]),
        ({"stage": "2"}, [1]),
        ({"stage": 3.0}, [2]),
        ({}, [0, 1, 2, 3, 4]),
    ],
)
def test_records_with_one_of_the_values_are_selected_in_their_order(where, selected):
    assert select([1, 2, "3", None, 1], where) == selected


def test_every_field_must_fit_and_one_value_of_a_list_is_enough():
    metadata = [{"a": 1, "b": ["x", "y"]}, {"a": 1, "b": ["z"]}, {"a": 2, "b": "x"}, {"a": True}]
    records = [Record((), (Turn("q", "a"),), metadata=one, origin=str(n)) for n, one in enumerate(metadata)]
    found = select_training(records, Selection.model_validate({"a": 1, "b": "x"}), None, 0)
    assert [record.origin for record in found] == ["0"]


def test_what_is_left_out_is_counted_and_named():
    notes = []
    stages = [1] * 4 + [2] * 6 + [None]
    select(stages, {"stage": 1, "share": 0.5}, {"stage": 2, "share": 0.5}, notify=notes.append)
    assert notes == [
        "`data.where` leaves out 9 of 11 train records: no stage (1), not in the share of 0.5 (2), stage 2 (6)",
        "`data.replay` trains on 3 of them: stage 2 (3)",
    ]


@FEW
@given(STAGES, SHARES, SHARES, st.integers(0, 5))
def test_shares_are_nested_exact_and_in_order(stages, one, other, seed):
    smaller, larger = sorted([one, other])
    found = select(stages, {"share": smaller}, seed=seed)
    assert len(found) == max(round(smaller * len(stages)), 1) and found == sorted(found)
    assert set(found) <= set(select(stages, {"share": larger}, seed=seed))


@FEW
@given(STAGES, SHARES, SHARES, st.integers(0, 5))
def test_replay_takes_a_nested_share_of_what_is_left_out_and_nothing_twice(stages, one, other, seed):
    stages = [1, 2, *stages]
    selected, smaller, larger = (
        set(select(stages, {"stage": 2}, replay and {"stage": 1, "share": replay}, seed))
        for replay in (None, *sorted([one, other]))
    )
    assert selected == {n for n, stage in enumerate(stages) if stage == 2}
    assert {stages[n] for n in smaller - selected} == {1} and selected < smaller <= larger
    assert len(smaller - selected) == max(round(min(one, other) * stages.count(1)), 1)


def test_a_share_is_the_same_in_every_process_and_another_with_another_seed():
    assert select([1] * 12, {"share": 0.3}, seed=7) == [2, 7, 8, 9]
    assert len({tuple(select([1] * 40, {"share": 0.5}, seed=seed)) for seed in range(10)}) == 10


@pytest.mark.parametrize(
    ("where", "replay", "message"),
    [
        ({"stag": 1}, None, "`data.where`: no record has the field stag; fields are stage"),
        ({"stage": [1, 4]}, None, "`data.where`: no record has stage 4; values are 1, 2"),
        ({"stage": 1}, {"stage": 1}, "`data.replay`: no record has stage 1; values are 2"),
        ({"stage": [1, 2]}, {"stage": 1}, "`data.where` leaves no record out, so `data.replay` has none"),
    ],
)
def test_a_selection_that_cannot_be_meant_is_refused(where, replay, message):
    with pytest.raises(RecordsError, match=message):
        select([1, 2, 2], where, replay)


def test_fields_that_no_record_has_together_are_refused():
    records = [Record((), (Turn("q", "a"),), metadata=one) for one in ({"a": 1, "b": 2}, {"a": 2, "b": 1})]
    with pytest.raises(RecordsError, match="`data.where` leaves no record"):
        select_training(records, Selection.model_validate({"a": 1, "b": 1}), None, 0)


def test_without_metadata_the_message_names_the_stage_map():
    with pytest.raises(RecordsError, match="records have no metadata; `data.stage_map` gives them some"):
        select([None], {"stage": 1})
