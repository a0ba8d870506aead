"""Lines over a common horizontal axis, as SVG: panels below each other, in a page or as a file of their own.

Design: a file has its colours in it, light or dark as the reader's system asks for, and no variables, which viewers
other than browsers do not know; these show the light colours. What lies outside a panel's range is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from lookonce.page.markup import node, svg
from lookonce.text import shown

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 62, 44
GAP = 34
"""Height between two panels, in SVG units, with the name of the lower one."""
MAX_POINTS = 1000
"""A line with more points is drawn with about this many of them."""
NUM_TICKS = 5

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
    parts = [node("text", shown(title), x=LEFT, y=22, class_="title"), *_legend(panels)]
    top = float(TOP)
    for panel in panels:
        parts += _panel(panel, top, x_ticks, last)
        top += panel.height + GAP
    base = top - GAP
    parts += [_text(_label(tick), _x(tick, last), base + 18, "middle") for tick in x_ticks]
    parts.append(_text(x_name, (LEFT + WIDTH - RIGHT) / 2, base + 36, "middle"))
    return svg(WIDTH, base + BOTTOM, *parts, label=title)


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
        return _x(point[0], last), y_of(point[1])

    heights = [(tick, y_of(tick)) for tick in y_ticks]
    parts = [node("line", x1=LEFT, x2=WIDTH - RIGHT, y1=_n(y), y2=_n(y), class_="grid") for _, y in heights]
    parts += [_text(_label(tick), LEFT - 9, y + 4, "end") for tick, y in heights]
    parts.append(_text(panel.name, LEFT, top - 10, "start"))
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
    x = float(WIDTH - RIGHT)
    for line in reversed([line for panel in panels for line in panel.lines if line.name]):
        x -= len(line.name) * 6.4
        parts.append(_text(line.name, x, 22, "start"))
        parts.append(node("polyline", points=f"{_n(x - 26)},18 {_n(x - 6)},18", class_=line.classes))
        x -= 44
    return parts


def _x(value: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / max(last, 1)


def _label(tick: float) -> str:
    return f"{tick:,.0f}" if abs(tick) >= 1000 else f"{tick:g}"


def _text(words: str, x: float, y: float, anchor: str, kind: str = "tick") -> Element:
    return node("text", words, x=_n(x), y=_n(y), text_anchor=anchor, class_=kind)


def _n(number: float) -> str:
    return f"{number:.1f}"
