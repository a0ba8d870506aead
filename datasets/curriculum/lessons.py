"""Lessons: the parts of an epoch that are trained on one after another, each with the records of one metadata value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated

from pydantic import Field

from lookonce.datasets.curriculum.values import DifferentValues, as_text, counted, named, texts_of
from lookonce.datasets.formats.record import Record
from lookonce.errors import RecordsError
from lookonce.settings import Section
from lookonce.text import count


class LessonOrder(Section):
    """The lessons of an epoch in their order."""

    by: Annotated[str, Field(min_length=1)]
    """The metadata field that says in which lesson a record is."""
    lessons: Annotated[DifferentValues, Field(min_length=1)]
    """The field's values, in the order of the lessons."""

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {as_text(value): number for number, value in enumerate(self.lessons)}

    def find(self, record: Record) -> int | None:
        """The number of a record's lesson, from 0; None if it is in no lesson, or in several."""
        texts = texts_of(record, self.by)
        return self._numbers.get(texts[0]) if len(texts) == 1 else None

    def lesson_of(self, record: Record) -> int:
        """The number of a record's lesson, from 0; it must have one."""
        number = self.find(record)
        assert number is not None, f"{record.origin}: {named(record, self.by)}"
        return number

    def check(self, records: Sequence[Record]) -> str:
        """How many records each lesson has, as text.

        Raises:
            RecordsError: records are in no lesson, or in several; counts and names their values.
        """
        sizes = Counter(map(self.find, records))
        if sizes[None]:
            others = counted(named(record, self.by) for record in records if self.find(record) is None)
            raise RecordsError(
                f"`batch.order`: {sizes[None]:,} of {count(len(records), 'train record')} are not in one lesson: "
                f"{others}; add the values to `lessons`, or leave the records out with `data.where`"
            )
        return ", then ".join(f"{self.by} {as_text(value)} ({sizes[n]:,})" for n, value in enumerate(self.lessons))
