"""Folds of images: they complement each other, share no image, and are the same in every process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookonce.datasets.context import ContextForm, with_context
from lookonce.datasets.curriculum import Fold, hold_out
from lookonce.datasets.formats.record import Record, Turn
from lookonce.errors import RecordsError

FEW = settings(max_examples=50)
IMAGES = st.lists(st.lists(st.integers(0, 9), max_size=2, unique=True), min_size=1, max_size=30)
NUM_FOLDS = st.integers(2, 4)
FORM = ContextForm(by="stage", order=[1, 2])


def records_of(images: list[list[int]]) -> list[Record]:
    """A record about each of these images, in stages 1 and 2 in turn."""
    return [
        Record(
            tuple(Path(str(one)) for one in some),
            (Turn(f"q{place}", "a"),),
            metadata={"stage": place % 2 + 1},
            origin=str(place),
        )
        for place, some in enumerate(images)
    ]


def keys_of(record: Record) -> tuple[str, ...]:
    """Images 0 and 1 have the same bytes."""
    return tuple(str(max(int(str(path)), 1)) for path in record.images)


def images_of(records: list[Record]) -> set[str]:
    return {key for record in records for key in keys_of(record)}


def folds_of(records: list[Record], number: int, seed: int = 0) -> list[tuple[list[Record], list[Record]]]:
    """What is trained on and what is left out, for each fold; none if there are too few images."""
    try:
        return [hold_out(records, Fold(fold=fold, of=number), seed, keys_of) for fold in range(1, number + 1)]
    except RecordsError:
        return []


@FEW
@given(IMAGES, NUM_FOLDS, st.integers(0, 5))
def test_every_image_is_left_out_once_and_never_trained_on_where_it_is(images, number, seed):
    records = records_of(images)
    folds = folds_of(records, number, seed)
    for trained_on, left_out in folds:
        assert images_of(trained_on).isdisjoint(images_of(left_out)) and left_out
        assert sorted([*trained_on, *left_out], key=records.index) == records
        assert trained_on == sorted(trained_on, key=records.index) and left_out == sorted(left_out, key=records.index)
    found = [record.origin for _, left_out in folds for record in left_out]
    assert not folds or sorted(found) == sorted(record.origin for record in records if record.images)


@FEW
@given(IMAGES, NUM_FOLDS)
def test_no_context_has_an_answer_of_a_model_that_trained_on_the_image(images, number):
    """The model of each fold answers what it was not trained on, and contexts have these answers."""
    records = records_of(images)
    folds = folds_of(records, number)
    answered_by = {record.origin: model for model, (_, some) in enumerate(folds) for record in some}

    def answered(record: Record) -> list[Turn]:
        return [Turn(turn.question, str(answered_by[record.origin])) for turn in record.turns]

    for record in with_context(records, FORM, keys_of, answered) if folds else []:
        for turn in record.known:
            trained_on, _ = folds[int(turn.answer)]
            assert images_of(trained_on).isdisjoint(keys_of(record))


def test_folds_have_as_many_images_to_one_and_follow_from_the_seed():
    records = records_of([[number] for number in range(1, 10)] * 2)
    assert [len(images_of(left_out)) for _, left_out in folds_of(records, 2)] == [5, 4]
    assert sorted(images_of(folds_of(records, 2, seed=7)[0][1])) == ["1", "2", "3", "5", "7"]
    assert len({frozenset(images_of(folds_of(records, 2, seed)[0][1])) for seed in range(10)}) > 5


def test_fewer_images_than_folds_are_refused():
    records = records_of([[1], [1, 2], [0], []])
    with pytest.raises(RecordsError, match="`data.held_out`: 1 image cannot be divided into 2 folds; images that a"):
        hold_out(records, Fold(fold=1, of=2), 0, keys_of)
