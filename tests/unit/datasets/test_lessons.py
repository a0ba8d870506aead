"""Lessons: each record in the one of its metadata value; records in none are counted, named and refused."""

from __future__ import annotations

import pytest

from lookonce.datasets.curriculum import LessonOrder
from lookonce.datasets.formats.record import Record, Turn
from lookonce.errors import RecordsError

ORDER = LessonOrder(by="stage", lessons=[2, "easy", 1])


def records_of(*stages: object) -> list[Record]:
    return [
        Record((), (Turn("q", "a"),), metadata={} if stage is None else {"stage": stage}, origin="a.jsonl:1")
        for stage in stages
    ]


def test_a_record_is_in_the_lesson_of_its_value_as_json_or_as_text():
    assert [ORDER.lesson_of(record) for record in records_of(1, "2", 2.0, "easy", [1])] == [2, 0, 0, 1, 2]
    assert ORDER.check(records_of(1, 2, 2)) == "stage 2 (2), then stage easy (0), then stage 1 (1)"


def test_records_in_no_lesson_are_counted_and_named():
    with pytest.raises(RecordsError) as error:
        ORDER.check(records_of(1, 3, 3, None, [1, 2]))
    assert str(error.value) == (
        "`batch.order`: 4 of 5 train records are not in one lesson: no stage (1), stage 1, 2 (1), stage 3 (2); "
        "add the values to `lessons`, or leave the records out with `data.where`"
    )
