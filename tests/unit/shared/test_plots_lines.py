"""Lines as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from lookonce.plots import MAX_POINTS, Line, Panel, line_plot, nice_ticks, svg_file, thinned

POINTS = [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.31, 0.62, [0.3, 0.4, 0.5, 0.6, 0.7]),
        (0, 2e-4, [0, 5e-5, 1e-4, 1.5e-4, 2e-4]),
        (1, 1, None),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_numbers_around_the_range(low, high, expected):
    found = nice_ticks(low, high)
    assert found == expected if expected else len(found) >= 2
    assert found[0] <= low and found[-1] >= high


def test_a_long_line_is_thinned_and_keeps_its_ends():
    points = [(float(x), 0.0) for x in range(12_345)]
    found = thinned(points)
    assert len(found) <= MAX_POINTS + 1 and (found[0], found[-1]) == (points[0], points[-1])
    assert thinned(POINTS) == POINTS and thinned([]) == []


def test_a_file_is_svg_with_its_own_colours_for_light_and_dark():
    lines = [Line("validation", POINTS, "marked"), Line("", POINTS, "faint")]
    plot = line_plot("<a run>", "step", [Panel("loss", lines, 1, 3, 300, POINTS[-1], "lowest")])
    text = svg_file(plot)
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("viewBox")
    assert "prefers-color-scheme: dark" in text and "var(" not in text
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<a run>", "step", "loss", "validation", "lowest"} <= set(words)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 3  # one is in the legend
