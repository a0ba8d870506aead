"""Values of metadata as texts, as they are compared and shown.

Design: a CSV file has texts alone, and a parquet column with gaps has 1.0 for 1. So values are compared as the texts
that JSON would write, without a needless `.0`: the 1 of a run file is also the "1" of a CSV file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from lookonce.datasets.formats.record import Record
from lookonce.text import listed, nfc, shown, value_of

MAX_NUMBER = 2**53
"""Larger integers are not exact as the floating-point numbers that other programs read."""


def _is_one_value(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("must be a text, a number, true or false")
    if not isinstance(value, str) and not abs(value) <= MAX_NUMBER:  # also not a number
        raise ValueError(f"must be a number from -{MAX_NUMBER:,} to {MAX_NUMBER:,}, or a text in quotes")
    return value


def as_list(value: Any) -> Any:
    """One value as a list of one."""
    return value if isinstance(value, list) else [value]


Value = Annotated[Any, AfterValidator(_is_one_value)]
Values = Annotated[list[Value], BeforeValidator(as_list), Field(min_length=1)]
"""One value or a list of them."""


def _are_different(values: list[Any]) -> list[Any]:
    most, number = next(iter(Counter(map(as_text, values)).most_common(1)), ("", 0))
    if number > 1:
        raise ValueError(f"has {shown(most)} twice; write each value once")
    return values


DifferentValues = Annotated[list[Value], AfterValidator(_are_different)]


def as_text(value: Any) -> str:
    """A value of metadata or of the run file as text, in the form in which texts are compared."""
    if isinstance(value, str):
        return nfc(value)
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return nfc(json.dumps(value, ensure_ascii=False, default=str))


def texts_of(record: Record, field: str) -> list[str]:
    """The values of a metadata field as texts: several if it is a list, none if the record lacks it."""
    value = value_of(record.metadata, field)
    return [] if value is None else [as_text(one) for one in as_list(value)]


def named(record: Record, field: str) -> str:
    """The record's value of a field for a message: "stage 2", "no stage"."""
    texts = texts_of(record, field)
    return f"{field} {shown(', '.join(texts))}" if texts else f"no {field}"


def counted(names: Iterable[str]) -> str:
    """How often each name occurs: "stage 2 (1,200), stage 3 (80)"."""
    numbers = sorted(Counter(names).items())
    return listed([f"{name} ({number:,})" for name, number in numbers], 10)
