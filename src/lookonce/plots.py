"""Elements of HTML and SVG, and plots of them: columns, bars, points, lines, and small plots in the cells of a table.

Design: elements are those of the standard library's ElementTree, which escapes all text and attributes. Nothing from
data can become markup: data is always the text of an element or the value of an attribute, never a string pasted into a
page. Characters that no page may contain, control characters and lone surrogates, are replaced. Colours of a page are
classes of its style sheet (page.py). A plot that is a file of its own has its colours in it, light or dark as the
reader's system asks for, and no variables, which viewers other than browsers do not know; these show the light colours.
A plot in a cell has a fixed size, so it can be read on a phone, where a plot as wide as the page is too small; its
numbers are beside it as text, which screen readers are given.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from lookonce.text import one_line, share, shown

NOT_ALLOWED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""The characters that an HTML page may not contain."""

Content = str | Element


def node(tag: str, *content: Content, **attributes: object) -> Element:
    """Make an element. In attribute names, write `class_` for class and `_` for `-`."""
    names = {name.rstrip("_").replace("_", "-"): clean(str(value)) for name, value in attributes.items()}
    element = Element(tag, names)
    for item in content:
        _append(element, item)
    return element


def svg(width: float, height: float, *content: Content, label: str) -> Element:
    """Make a drawing that scales to the width of its parent; screen readers read `label`."""
    element = node("svg", *content, role="img", aria_label=label)
    element.set("viewBox", f"0 0 {width:g} {height:g}")
    return element


def clean(text: str) -> str:
    """Replace the characters that a page may not contain."""
    return NOT_ALLOWED.sub("\ufffd", text)


def _append(element: Element, item: Content) -> None:
    if isinstance(item, Element):
        element.append(item)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + clean(item)
    else:
        element.text = (element.text or "") + clean(item)


WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 22, 46
"""The margins, in SVG units; the numbers and names of the axes are in them."""
LINES_LEFT, LINES_RIGHT, LINES_TOP, LINES_BOTTOM = 72, 24, 62, 44
"""Those of a plot of lines."""
FONT, NAME_FONT = 12, 13
"""The sizes of the plots' text in SVG units; the style sheet has them too."""
NARROW, WIDE = frozenset(" !'(),-./:;I[]fijlrt|"), frozenset("#%&+<=>@MW_mw~")
"""Characters that are narrower or wider than others, in DejaVu Sans, which is wider than most fonts."""
MAX_COLUMN = 64
"""The largest width of a column."""
NUM_SHADES = 5
"""A bar shows this many shares by themselves, and the rest as one."""
NUM_TICKS = 5
MIN_LETTERS = 4
"""A text is shortened to no fewer letters than this."""


def binned(counts: Mapping[int, int], max_bins: int) -> list[tuple[str, int]]:
    """Sum up how often each number occurs in at most `max_bins` ranges of the same width, named "3" or "3-5"."""
    low, high = min(counts), max(counts)
    width = -(-(high - low + 1) // max_bins)
    return [
        (
            str(start) if width == 1 else f"{start:,}-{start + width - 1:,}",
            sum(counts.get(number, 0) for number in range(start, start + width)),
        )
        for start in range(low, high + 1, width)
    ]


def columns(numbers: Sequence[tuple[str, int]], x_name: str, y_name: str, height: int = 300) -> Element:
    """Draw a column for each named number, with the number above it where there is room."""
    ticks = _ticks(max((number for _, number in numbers), default=0))
    step = (WIDTH - LEFT - RIGHT) / max(len(numbers), 1)
    base = height - BOTTOM

    def y_of(value: float) -> float:
        return base - (base - TOP) * value / ticks[-1]

    parts = [*_grid(ticks, y_of)]
    every = math.ceil(max((text_width(name) for name, _ in numbers), default=1) * 1.1 / step)
    for index, (name, number) in enumerate(numbers):
        x, y = LEFT + index * step, y_of(number)
        width = min(step * 0.8, MAX_COLUMN)
        box = {"x": x + (step - width) / 2, "y": y, "width": width, "height": base - y}
        title = node("title", f"{name}: {number:,}")
        parts.append(node("rect", title, class_="bar", **{key: _n(value) for key, value in box.items()}))
        if index % every == 0:
            parts.append(_text(name, x + step / 2, base + 17, "middle"))
        if number and text_width(f"{number:,}") <= step:
            parts.append(_text(f"{number:,}", x + step / 2, y - 5, "middle", "value"))
    return svg(WIDTH, height, *parts, *_axis_names(x_name, y_name, height), label=f"{y_name} by {x_name}")


def shares(lines: Sequence[tuple[str, int, Sequence[tuple[str, int]]]], label: str) -> Element:
    """Draw a bar of full width for each line (a name, a total and its largest shares), with the rest last."""
    step, height = 50, 24
    parts: list[Element] = []
    for index, (name, total, largest) in enumerate(lines):
        top = index * step
        room = WIDTH - text_width(f"{total:,}") - 2 * FONT
        parts.append(_text(_cut(name, room, NAME_FONT), 0, top + 14, "start", "name"))
        parts.append(_text(f"{total:,}", WIDTH, top + 14, "end"))
        rest = total - sum(amount for _, amount in largest[:NUM_SHADES])
        drawn = [(*one, f"shade{shade}") for shade, one in enumerate(largest[:NUM_SHADES], start=1)]
        drawn += [("all others", rest, "rest")] if rest else []
        x = 0.0
        for words, amount, shade in drawn:
            width = WIDTH * share(amount, total)
            parts.append(_share(words, amount, total, x, top + 20, width, height, shade))
            x += width
    return svg(WIDTH, max(len(lines) * step, 1), *parts, label=label)


def points(counts: Mapping[tuple[int, int], int], x_name: str, y_name: str, height: int = 420) -> Element:
    """Draw a circle for each pair of numbers; its area shows how often the pair occurs."""
    x_ticks = _ticks(max((x for x, _ in counts), default=0))
    y_ticks = _ticks(max((y for _, y in counts), default=0))
    most = max(counts.values(), default=1)
    base = height - BOTTOM

    def x_of(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / x_ticks[-1]

    def y_of(value: float) -> float:
        return base - (base - TOP) * value / y_ticks[-1]

    circles = [
        node(
            "circle",
            node("title", f"{x:,} x {y:,}: {number:,}"),
            cx=_n(x_of(x)),
            cy=_n(y_of(y)),
            r=_n(3 + 15 * math.sqrt(number / most) if most > 1 else 4),
            class_="dot",
        )
        for (x, y), number in sorted(counts.items(), key=lambda pair: -pair[1])
    ]
    x_numbers = [_text(f"{tick:,}", x_of(tick), base + 17, "middle") for tick in x_ticks]
    return svg(
        WIDTH,
        height,
        *_grid(y_ticks, y_of),
        *x_numbers,
        *circles,
        *_axis_names(x_name, y_name, height),
        label=f"{y_name} by {x_name}",
    )


def _share(words: str, amount: int, total: int, x: float, y: float, width: float, height: float, shade: str) -> Element:
    """Draw a share of a bar, with as much of its label as fits; its own <svg> element cuts off the rest."""
    percent = f"{share(amount, total):.0%}"
    box = node("rect", node("title", f"{words}: {amount:,} ({percent})"), class_=shade, width="100%", height="100%")
    room = width - 12
    label = _cut(words, room - text_width(f" {percent}"), FONT)
    label = f"{label} {percent}" if label else percent if text_width(percent) <= room else ""
    inside = [_text(label, 6, height / 2 + 4, "start", "inside")] if label else []
    return node("svg", box, *inside, x=_n(x), y=_n(y), width=_n(max(width - 1.5, 0.5)), height=_n(height))


def text_width(text: str, font: float = FONT) -> float:
    """The width of a text in a wide font, in SVG units."""
    return font * sum(_em(char) for char in text)


def _em(char: str) -> float:
    if char in NARROW:
        return 0.41
    if char in WIDE or char > "\u2000":
        return 1.0
    return 0.79 if char.isupper() else 0.64


def _cut(words: str, room: float, font: float) -> str:
    """As much of a text as fits, with dots for the rest; empty if less than `MIN_LETTERS` do."""
    words = one_line(words)
    if text_width(words, font) <= room:
        return words
    ends = accumulate(font * _em(char) for char in words)
    fitting = bisect_right(list(ends), room - text_width("...", font))
    return f"{words[:fitting].rstrip()}..." if fitting >= MIN_LETTERS else ""


def _grid(ticks: Sequence[int], y_of: Callable[[float], float]) -> list[Element]:
    """Draw the horizontal lines and the numbers of the y axis."""
    heights = [_n(y_of(tick)) for tick in ticks]
    lines = [node("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid") for y in heights]
    return lines + [_text(f"{tick:,}", LEFT - 8, y_of(tick) + 4, "end") for tick in ticks]


def _axis_names(x_name: str, y_name: str, height: float) -> list[Element]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [_text(x_name, middle, height - 8, "middle", "axis"), _text(y_name, 0, 11, "start", "axis")]


def _text(words: str, x: float, y: float, anchor: str, kind: str = "tick") -> Element:
    return node("text", words, x=_n(x), y=_n(y), text_anchor=anchor, class_=kind)


def _ticks(most: float) -> list[int]:
    """Return round numbers from 0 up to at least `most`."""
    raw = max(most, 1) / NUM_TICKS
    power = 10 ** math.floor(math.log10(raw)) if raw >= 1 else 1
    step = next(int(power * times) for times in (1, 2, 5, 10) if power * times >= raw)
    return list(range(0, math.ceil(max(most, 1) / step) * step + 1, step))


def _n(number: float) -> str:
    return f"{number:.1f}"


GAP = 34
"""Height between two panels, in SVG units, with the name of the lower one."""
MAX_POINTS = 1000
"""A line with more points is drawn with about this many of them."""

FILE_STYLE = """
.paper { fill: #fbfbf9 }
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #5d6873 }
text.title { font-size: 16px; font-weight: 600; fill: #1d232b }
text.value { fill: #1d232b }
.grid { stroke: #e2e5e8; stroke-width: 1 }
polyline { fill: none; stroke-linejoin: round; stroke-linecap: round }
.faint { stroke: #3b7a9e; stroke-width: 1; stroke-opacity: 0.3 }
.main { stroke: #3b7a9e; stroke-width: 2.2 }
.marked { stroke: #c0621b; stroke-width: 1.8 }
circle.marked { fill: #c0621b; stroke: #fbfbf9; stroke-width: 1 }
circle.ring { fill: none; stroke: #c0621b; stroke-width: 1.8 }
.plain { stroke: #5d6873; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14181d }
  text { fill: #98a3ae }
  text.title, text.value { fill: #e6eaee }
  .grid { stroke: #2d343c }
  .faint { stroke: #6fb0d4; stroke-opacity: 0.35 }
  .main { stroke: #6fb0d4 }
  .marked { stroke: #f0a35a }
  circle.marked { fill: #f0a35a; stroke: #14181d }
  circle.ring { stroke: #f0a35a }
  .plain { stroke: #98a3ae }
}
"""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points from left to right."""

    name: str
    """In the legend; a line without a name is not in it."""
    points: Sequence[Point]
    kind: Literal["faint", "main", "marked", "plain"]
    """`marked` has a circle at each point."""
    colour: int = 0
    """The number of its colour in the page's style sheet; 0 is the colour of its kind."""

    @property
    def classes(self) -> str:
        return f"{self.kind} line{self.colour}" if self.colour else self.kind


@dataclass(frozen=True)
class Panel:
    """Lines with a common vertical axis, drawn in order."""

    name: str
    lines: Sequence[Line]
    low: float
    high: float
    height: int
    marked: Point | None = None
    """A point to mark, with `words` beside it."""
    words: str = ""


def line_plot(title: str, x_name: str, panels: Sequence[Panel]) -> Element:
    """Draw the panels below each other."""
    last = max((x for panel in panels for line in panel.lines for x, _ in line.points), default=1)
    x_ticks = [tick for tick in nice_ticks(0, last) if tick <= last]
    parts = [node("text", shown(title), x=LINES_LEFT, y=22, class_="title"), *_legend(panels)]
    top = float(LINES_TOP)
    for panel in panels:
        parts += _panel(panel, top, x_ticks, last)
        top += panel.height + GAP
    base = top - GAP
    parts += [_text(_tick_label(tick), _line_x(tick, last), base + 18, "middle") for tick in x_ticks]
    parts.append(_text(x_name, (LINES_LEFT + WIDTH - LINES_RIGHT) / 2, base + 36, "middle"))
    return svg(WIDTH, base + LINES_BOTTOM, *parts, label=title)


def svg_file(drawing: Element) -> str:
    """A drawing as the text of a file."""
    _, _, width, height = drawing.get("viewBox", "").split()
    file = node("svg", node("style", FILE_STYLE), node("rect", class_="paper", width="100%", height="100%"))
    file.extend(list(drawing))
    for name, value in drawing.attrib.items():
        file.set(name, value)
    for name, value in {"xmlns": "http://www.w3.org/2000/svg", "width": width, "height": height}.items():
        file.set(name, value)
    return f"{ElementTree.tostring(file, encoding='unicode')}\n"


def nice_ticks(low: float, high: float) -> list[float]:
    """Round numbers, the first at most `low` and the last at least `high`."""
    raw = max(high - low, 1e-12) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, max(last, first + 1) + 1)]


def _panel(panel: Panel, top: float, x_ticks: Sequence[float], last: float) -> list[Element]:
    y_ticks = nice_ticks(panel.low, panel.high)
    if panel.height < 120:
        y_ticks = [y_ticks[0], y_ticks[-1]]
    low, high = y_ticks[0], y_ticks[-1]

    def y_of(value: float) -> float:
        return top + panel.height * (1 - (value - low) / (high - low))

    def place(point: Point) -> Point:
        return _line_x(point[0], last), y_of(point[1])

    heights = [(tick, y_of(tick)) for tick in y_ticks]
    parts = [node("line", x1=LINES_LEFT, x2=WIDTH - LINES_RIGHT, y1=_n(y), y2=_n(y), class_="grid") for _, y in heights]
    parts += [_text(_tick_label(tick), LINES_LEFT - 9, y + 4, "end") for tick, y in heights]
    parts.append(_text(panel.name, LINES_LEFT, top - 10, "start"))
    # An <svg> element of its own cuts off what lies above or below the range.
    inside = node("svg", x=0, y=_n(top - 4), width=WIDTH, height=_n(panel.height + 8))
    inside.set("viewBox", f"0 {_n(top - 4)} {WIDTH} {_n(panel.height + 8)}")
    for line in panel.lines:
        inside.extend(_line(line, [place(point) for point in thinned(line.points)]))
    parts.append(inside)
    if panel.marked:
        x, y = place(panel.marked)
        parts.append(node("circle", cx=_n(x), cy=_n(y), r=6, class_="ring"))
        anchor = "end" if x > WIDTH / 2 else "start"
        parts.append(_text(panel.words, x + (-10 if anchor == "end" else 10), y - 10, anchor, "value"))
    return parts


def _line(line: Line, points: Sequence[Point]) -> list[Element]:
    path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
    parts = [node("polyline", points=path, class_=line.classes)]
    if line.kind == "marked":
        parts += [node("circle", cx=_n(x), cy=_n(y), r=3, class_=line.classes) for x, y in points]
    return parts


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `MAX_POINTS` points and the last one."""
    every = -(-len(points) // MAX_POINTS) or 1
    return [*points[::every], *(points[-1:] if every > 1 else [])]


def _legend(panels: Sequence[Panel]) -> list[Element]:
    """The named lines, from right to left at the top."""
    parts: list[Element] = []
    x = float(WIDTH - LINES_RIGHT)
    for line in reversed([line for panel in panels for line in panel.lines if line.name]):
        x -= len(line.name) * 6.4
        parts.append(_text(line.name, x, 22, "start"))
        parts.append(node("polyline", points=f"{_n(x - 26)},18 {_n(x - 6)},18", class_=line.classes))
        x -= 44
    return parts


def _line_x(value: float, last: float) -> float:
    return LINES_LEFT + (WIDTH - LINES_LEFT - LINES_RIGHT) * value / max(last, 1)


def _tick_label(tick: float) -> str:
    return f"{tick:,.0f}" if abs(tick) >= 1000 else f"{tick:g}"


CELL_WIDTH, CELL_HEIGHT, CELL_MARGIN = 132, 18, 6


def number_cell(words: str, small: str, *plot: Element) -> Element:
    """Make a cell: a number as words, and smaller words below."""
    return node("div", node("span", words), *([node("small", small)] if small else []), *plot, class_="share")


def share_cell(words: str, small: str, share: float, ends: tuple[float, float] | None, mark: float) -> Element:
    """Make a cell: a share as words, smaller words below, and a plot from 0 to 1.

    The plot has a dot at the share, a line between the `ends` of its interval, and a small vertical line at the `mark`.
    """
    low, high = ends or (share, share)
    middle = CELL_HEIGHT / 2
    axis = node("line", x1=_cell_x(0), x2=_cell_x(1), y1=middle, y2=middle, class_="grid")
    line = node("line", x1=_cell_x(low), x2=_cell_x(high), y1=middle, y2=middle, class_="range")
    tick = node("line", x1=_cell_x(mark), x2=_cell_x(mark), y1=2, y2=CELL_HEIGHT - 2, class_="mark")
    dot = node("circle", cx=_cell_x(share), cy=middle, r=4, class_="value")
    drawing = node(
        "svg", axis, tick, line, dot, width=CELL_WIDTH, height=CELL_HEIGHT, class_="cell", aria_hidden="true"
    )
    drawing.set("viewBox", f"0 0 {CELL_WIDTH} {CELL_HEIGHT}")
    return number_cell(words, small, drawing)


def _cell_x(share: float) -> str:
    return f"{CELL_MARGIN + (CELL_WIDTH - 2 * CELL_MARGIN) * share:.1f}"
