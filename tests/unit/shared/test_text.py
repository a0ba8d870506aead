"""Numbers and tables in the form that people read."""

from __future__ import annotations

import pytest

from lookonce.text import count, duration, faster, rows, size, table


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1_300_000, "1.3 MB"),
        (7_500_000_000, "7.5 GB"),
        (2_000_000_000_000, "2.0 TB"),
        (5_000_000_000_000_000, "5000.0 TB"),
    ],
)
def test_size_is_in_decimal_units(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.94, "0.9 s"),
        (59.9, "59.9 s"),
        (60, "1 min 0 s"),
        (119.6, "2 min 0 s"),
        (252, "4 min 12 s"),
        (3599, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (12_000, "3 h 20 min"),
        (360_000, "100 h 0 min"),
    ],
)
def test_duration_is_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 images"), (1, "1 image"), (2, "2 images"), (6500, "6,500 images")])
def test_count_agrees_with_its_noun(number: int, text: str) -> None:
    assert count(number, "image") == text


def test_rows_align_values_without_trailing_blanks() -> None:
    assert rows([("model", "tiny"), ("output folder", "runs/a"), ("none", "")]) == (
        "  model          tiny\n  output folder  runs/a\n  none"
    )


def test_table_aligns_the_first_column_left_and_numbers_right() -> None:
    assert table(("part", "images", "share"), [("train", "6,500", "70 %"), ("validation", "5", "")]) == (
        "part        images  share\ntrain        6,500   70 %\nvalidation       5"
    )


def test_a_table_without_lines_is_its_header() -> None:
    assert table(("part", "images"), []) == "part  images"


@pytest.mark.parametrize(
    ("ratio", "expected"), [(2.54, "2.5 times faster"), (1, "1.0 times faster"), (0.5, "2.0 times slower")]
)
def test_a_ratio_below_one_is_slower(ratio: float, expected: str) -> None:
    assert faster(ratio) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [(size(999.6), "1.0 kB"), (size(999_960), "1.0 MB"), (duration(59.97), "1 min 0 s"), (duration(59.94), "59.9 s")],
)
def test_numbers_that_round_up_take_the_next_unit(found: str, expected: str) -> None:
    assert found == expected
