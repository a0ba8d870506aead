"""Numbers and tables in the form that people read, and the names of what differs between two settings."""

from __future__ import annotations

from typing import Any

import pytest

from lookonce.differences import Difference, differences
from lookonce.text import duration, size, table


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (999, "999 B"),
        (999.6, "1.0 kB"),
        (999_960, "1.0 MB"),
        (7_500_000_000, "7.5 GB"),
        (5_000_000_000_000_000, "5000.0 TB"),
    ],
)
def test_size_is_in_decimal_units(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.94, "0.9 s"),
        (59.97, "1 min 0 s"),
        (252, "4 min 12 s"),
        (3599.6, "1 h 0 min"),
        (360_000, "100 h 0 min"),
    ],
)
def test_duration_is_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_table_aligns_the_first_column_left_and_numbers_right() -> None:
    assert table(("part", "images", "share"), [("train", "6,500", "70 %"), ("valid\nation", "5", "")]) == (
        "part          images  share\ntrain          6,500   70 %\nvalid\\nation       5"
    )


LONG = [("Where in the image is the abnormality, if there is one?", "6,500", "centre; lower-left; upper-right", "70 %")]


def test_a_table_fits_a_terminal_by_shortening_its_longest_texts() -> None:
    header, *lines = table(("question", "asked", "majority", "share"), LONG * 2, width=60).splitlines()
    assert len(header) <= 60 and [len(line) for line in lines] == [60, 60]
    assert lines[0].split()[:2] == ["Where", "in"] and lines[0].count("...") == 2 and lines[0].endswith("70 %")
    assert lines[0].startswith("Where in the image is the ...") and " 6,500  centre; lowe..." in lines[0]


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}, []),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
        ({"a": 1}, {}, [("a", 1, None)]),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 1, "d": 3}}}, [("a.b.d", 2, 3)]),
        ({"a": [1, 2]}, {"a": [2, 1]}, [("a", [1, 2], [2, 1])]),
        ({"a": 1}, {"a": {"b": 1}}, [("a", 1, None), ("a.b", None, 1)]),
        ({"z": 1, "m": {"b": 1, "a": 1}}, {"z": 2, "m": {"b": 2, "a": 2}}, [("m.a", 1, 2), ("m.b", 1, 2), ("z", 1, 2)]),
    ],
    ids=["equal", "order", "only mine", "nested", "list", "other shape", "sorted"],
)
def test_differences_are_named_by_dotted_name_in_order(
    mine: dict[str, Any], theirs: dict[str, Any], expected: list[Difference]
) -> None:
    assert differences(mine, theirs) == expected
    assert differences(theirs, mine) == [(name, other, one) for name, one, other in expected]
