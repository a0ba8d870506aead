"""Numbers, tables, plots and texts in the form that people read; any can be shown, and the same give the same bytes."""

from __future__ import annotations

import json
import math
import re

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.html_page import HOSTILE, Page

from lookonce.page import (
    VARIABLES,
    Line,
    Panel,
    _environment,
    curves,
    forest,
    histogram,
    points,
    to_svg,
    words,
    write_pdf,
)
from lookonce.settings import differences
from lookonce.text import binned, duration, json_text, size, table


def test_size_is_in_decimal_units() -> None:
    sizes = {999: "999 B", 999.6: "1.0 kB", 999_960: "1.0 MB", 7_500_000_000: "7.5 GB", 5 * 10**15: "5000.0 TB"}
    assert {number: size(number) for number in sizes} == sizes


def test_duration_is_in_its_two_largest_units() -> None:
    times = {0.94: "0.9 s", 59.97: "1 min 0 s", 252: "4 min 12 s", 3599.6: "1 h 0 min", 360_000: "100 h 0 min"}
    assert {seconds: duration(seconds) for seconds in times} == times


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
def test_differences_are_named_by_dotted_name_in_order(mine, theirs, expected):
    assert differences(mine, theirs) == expected
    assert differences(theirs, mine) == [(name, other, one) for name, one, other in expected]


POINTS, FLOAT = {1: 3.0, 2: 2.0, 3: 1.0}, st.floats(width=32)


def variant(name: str, seeds: list[float], ends: tuple[float, float] | None = None, difference: float | None = None):
    """Figures of a variant."""
    scores = {"score": 0.5, "score_by_seed": seeds, "interval": ends, "majority": 0.4}
    return {"variant": name, "difference": difference, "difference_interval": ends, "is_distinguishable": True} | scores


VARIANTS = [variant("plain", [0.8, 0.8], (0.7, 0.9)), variant("_x", [0.9], None, 0.1)]


def losses(name: str = "loss"):
    lines = [Line(name, POINTS, "marked"), Line("", POINTS, "faint"), Line("_other", POINTS, "line", 7)]
    return curves(Panel(name, lines, (1, 3)), "step")


def drawn():
    """One plot of each kind."""
    counts = {number: number**3 for number in range(1, 200)}
    sizes = {(1, 1): 1, (10**5, 10**5): 10**6}
    return (
        losses(),
        forest(VARIANTS, "exact match"),
        histogram(counts, "x", "y"),
        points(sizes, "x", "y"),
        points({}, "x", "y"),
    )


def test_the_same_numbers_give_the_same_bytes_whatever_the_users_settings_are(tmp_path):
    before = [to_svg(plot, "x") for plot in drawn()]
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": "other", "text.usetex": True}):
        assert [to_svg(plot, "x") for plot in drawn()] == before
    for name in "ab":
        write_pdf(losses(), tmp_path / name)
    pdf = (tmp_path / "a").read_bytes()
    assert pdf == (tmp_path / "b").read_bytes() and pdf.startswith(b"%PDF") and b"CreationDate" not in pdf


def test_a_plot_in_a_page_has_the_pages_colours_and_no_id_twice():
    plots = [to_svg(plot, "a <plot>") for plot in drawn()]
    for text in plots:
        page = Page(text)
        values = page.found[0][1]
        assert page.found[0] == ("svg", {"viewbox": values["viewbox"], "role": "img", "aria-label": "a <plot>"})
        assert not re.search("#[0-9a-f]{6}|<style|<metadata|<!|http", text) and "var(--" in text
        assert {*re.findall(r"var\((.*?)\)", text)} <= {*VARIABLES.values()}
    ids = {one: text for text in plots for one in re.findall(r' id="(.*?)"', text)}
    for one, text in ids.items():  # of what is referred to; another plot has it too only if it is the same
        content = re.search(rf'<\w+ id="{one}".*?/>', text, re.S)
        assert content and all(content[0] in other for other in plots if f'id="{one}"' in other)


def test_a_plot_has_text_as_text():
    found = Page(to_svg(losses("<b>loss</b> $x$"), "x")).text
    assert {"step", "<b>loss</b> $x$"} <= set(found)
    assert " _other" in found, "matplotlib leaves names with _ out of its legend"


@pytest.mark.guarantee("No text of a record or of an answer becomes markup.")
@pytest.mark.parametrize("words", [*HOSTILE[::3], "$\\frac{", "小さなポリープ" + "x" * 9000, "\u202eleft"])
def test_any_name_is_drawn_as_text(words):
    drawn = to_svg(losses(words), words), to_svg(forest([variant(words, [], (0.4, 0.6))], words), words)
    assert all(Page(text).found and "\u202e" not in text and len(text) < 50_000 for text in drawn)


@settings(max_examples=15)
@given(st.dictionaries(st.integers(0, 2**53), FLOAT, max_size=5), st.tuples(FLOAT, FLOAT))
def test_any_numbers_are_drawn(values, limits):
    line = Line("a", values, "marked")
    assert Page(to_svg(curves(Panel("loss", [line], limits), "step"), "x")).found


def test_each_seed_has_a_height_of_its_own_so_that_none_hides_another():
    svg = to_svg(forest([variant("a", [0.5] * 9)], "BLEU"), "x")
    circles = re.findall(r'<use xlink:href="(#\w+)" x="([\d.]+)" y="([\d.]+)" style="fill: [^"]*fill-opacity: 0.6', svg)
    heights = [y for _, x, y in circles if x == circles[0][1]]  # another circle is in the legend
    assert len(circles) == 10 and len(set(heights)) == 9


@given(st.dictionaries(st.integers(0, 10_000), st.integers(1, 9), min_size=1), st.integers(1, 40))
def test_bins_hold_every_number_once(counts, max_bins):
    bins = binned(counts, max_bins)
    assert len(bins) <= max_bins and sum(number for _, number in bins) == sum(counts.values())


PRINTED = st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")
TEMPLATE = '{% from "parts.html.jinja" import td, picture %}<p>{{ one }}</p>{{ td(one, other) }}{{ picture("", one) }}'


@given(st.text(PRINTED), st.text(PRINTED))
def test_any_text_is_shown_as_itself(one, other):
    page = Page(_environment().from_string(TEMPLATE).render(one=one, other=other))
    assert "".join(page.text).strip("\n") == f"{one}{other}{one}".strip("\n")
    assert [values["data-name"] for _, values in page.found if "data-name" in values] == [one]
    escaped = _environment().from_string("{{ text }}").render(text=f"\x1b\ud800{one}")
    assert "\x1b" not in escaped and escaped.encode("utf-8")


def test_a_text_without_anything_to_see_is_named_and_a_long_one_is_cut():
    assert words("") == words(" \n\t") == "(empty)"
    assert words(" no\x00") == " no\\x00"
    assert len(words("a" * 5000)) == 240 and words("a" * 240) == "a" * 240


def test_numbers_that_are_not_finite_are_null_in_json():
    value = {"a": [math.nan, 1.5, {"b": -math.inf}], "c": (math.inf, "NaN")}
    assert json.loads(json_text(value)) == {"a": [None, 1.5, {"b": None}], "c": [None, "NaN"]}
