"""Plots as SVG: any numbers can be drawn, shares fill their bar, and bins hold every number once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.plots import binned, columns, points, shares, text_width


def test_plots_of_nothing_and_of_large_numbers_are_drawn():
    for drawing in (
        columns([], "x", "y"),
        columns([(str(number), number**3) for number in range(200)], "x", "y"),
        shares([], "x"),
        shares([("question", 10**6, [(f"answer {number}", 10) for number in range(10)])], "x"),
        points({}, "x", "y"),
        points({(1, 1): 1, (10**5, 10**5): 10**6}, "x", "y"),
    ):
        numbers = [
            element.get(name)
            for element in drawing.iter()
            for name in ("x", "y", "cx", "cy", "width")
            if element.get(name)
        ]
        assert all(re.fullmatch(r"-?[\d.]+%?", number) for number in numbers)


def test_the_shares_of_a_bar_fill_it():
    drawing = shares([("question", 40, [("yes", 20), ("no", 10), ("maybe", 4), ("a", 2), ("b", 1), ("c", 1)])], "x")
    parts = [element for element in drawing if element.tag == "svg"]
    titles = [part.find("rect/title").text for part in parts]
    assert titles[0] == "yes: 20 (50%)" and titles[-1].startswith("all others: 3") and len(parts) == 6
    edges = [(float(part.get("x")), float(part.get("x")) + float(part.get("width"))) for part in parts]
    assert all(end <= start < end + 3 for (_, end), (start, _) in zip(edges, edges[1:], strict=False))


@pytest.mark.parametrize("words", ["Is it?", "WWWW MMMM", "illicit fillet", "小さなポリープがあります", "x" * 9000])
def test_the_label_of_a_share_fits_into_it(words):
    for amount in (*range(1, 40), 99):
        part = shares([("question", 100, [(words, amount)])], "x").find("svg")
        label = part.findtext("text") or ""
        assert 6 + text_width(label) <= float(part.get("width")), amount
        assert label.startswith(words[:4]) or label in (f"{amount}%", "")


def test_wide_letters_need_more_room_than_narrow_ones():
    """The label WWW was drawn into a bar for three letters of average width, and clipped."""
    wide, narrow = (shares([("?", 100, [(words, 7)])], "x").findtext("svg/text") for words in ("WWW", "lil"))
    assert (wide, narrow) == ("7%", "lil 7%")


@pytest.mark.parametrize("name", ["Is it?", "WHERE IS THE ABNORMALITY? " * 9, "異常はありますか？" * 20])
def test_the_name_of_a_bar_ends_before_its_total(name):
    name, total, *_ = shares([(name, 1234, [("yes", 1)])], "x").findall("text")
    assert text_width(name.text, 13) + text_width(total.text) < 960


@given(st.dictionaries(st.integers(0, 10_000), st.integers(1, 9), min_size=1), st.integers(1, 40))
def test_bins_hold_every_number_once(counts, max_bins):
    bins = binned(counts, max_bins)
    assert len(bins) <= max_bins and sum(number for _, number in bins) == sum(counts.values())
