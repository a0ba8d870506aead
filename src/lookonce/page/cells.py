"""Cells of a table with more than a text: a number above its interval, and a small plot of both as SVG.

Design: a plot in a cell has a fixed size, so it can be read on a phone, where a plot as wide as the page is too small.
The numbers are beside it as text; screen readers are given these.
"""

from __future__ import annotations

from xml.etree.ElementTree import Element

from lookonce.page.markup import node

WIDTH, HEIGHT, MARGIN = 132, 18, 6


def number_cell(words: str, small: str, *plot: Element) -> Element:
    """Make a cell: a number as words, and smaller words below."""
    return node("div", node("span", words), *([node("small", small)] if small else []), *plot, class_="share")


def share_cell(words: str, small: str, share: float, ends: tuple[float, float] | None, mark: float) -> Element:
    """Make a cell: a share as words, smaller words below, and a plot from 0 to 1.

    The plot has a dot at the share, a line between the `ends` of its interval, and a small vertical line at the `mark`.
    """
    low, high = ends or (share, share)
    middle = HEIGHT / 2
    axis = node("line", x1=_x(0), x2=_x(1), y1=middle, y2=middle, class_="grid")
    line = node("line", x1=_x(low), x2=_x(high), y1=middle, y2=middle, class_="range")
    tick = node("line", x1=_x(mark), x2=_x(mark), y1=2, y2=HEIGHT - 2, class_="mark")
    dot = node("circle", cx=_x(share), cy=middle, r=4, class_="value")
    drawing = node("svg", axis, tick, line, dot, width=WIDTH, height=HEIGHT, class_="cell", aria_hidden="true")
    drawing.set("viewBox", f"0 0 {WIDTH} {HEIGHT}")
    return number_cell(words, small, drawing)


def _x(share: float) -> str:
    return f"{MARGIN + (WIDTH - 2 * MARGIN) * share:.1f}"
