"""Plots as SVG: columns, shares, and points by width and height. Colours are the page's (style.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from xml.etree.ElementTree import Element

from lookonce.page.markup import node, svg
from lookonce.text import share, shown

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 22, 46
"""Margins, in which the axes' numbers and names are."""
LETTER = 6.4
"""Width of a letter of the plots' text, about."""
MAX_COLUMN = 64
NUM_SHADES = 5
NUM_TICKS = 5


def columns(numbers: Sequence[tuple[str, int]], x_name: str, y_name: str, height: int = 300) -> Element:
    """A column a number, from left to right; the numbers above them as far as there is room."""
    tallest = max((number for _, number in numbers), default=0)
    ticks = _ticks(tallest)
    wide = (WIDTH - LEFT - RIGHT) / max(len(numbers), 1)
    base = height - BOTTOM

    def y_of(value: float) -> float:
        return base - (base - TOP) * value / ticks[-1]

    parts = [*_horizontal(ticks, y_of)]
    every = math.ceil(max((len(name) for name, _ in numbers), default=1) * LETTER * 1.2 / wide)
    for place, (name, number) in enumerate(numbers):
        x, y = LEFT + place * wide, y_of(number)
        broad = min(wide * 0.8, MAX_COLUMN)
        place_and_size = {"x": x + (wide - broad) / 2, "y": y, "width": broad, "height": base - y}
        title = node("title", f"{name}: {number:,}")
        parts.append(node("rect", title, class_="bar", **{key: _n(value) for key, value in place_and_size.items()}))
        if place % every == 0:
            parts.append(_text(name, x + wide / 2, base + 17, "middle"))
        if number and len(f"{number:,}") * LETTER <= wide:
            parts.append(_text(f"{number:,}", x + wide / 2, y - 5, "middle", "value"))
    return svg(WIDTH, height, *parts, *_names(x_name, y_name, height), label=f"{y_name} by {x_name}")


def shares(lines: Sequence[tuple[str, int, Sequence[tuple[str, int]]]]) -> Element:
    """A bar of full width a line (a name, a whole and its largest parts), cut into shares; the rest comes last."""
    step, high = 50, 24
    parts: list[Element] = []
    for number, (name, whole, pieces) in enumerate(lines):
        top = number * step
        parts.append(_text(shown(name, 110), 0, top + 14, "start", "name"))
        parts.append(_text(f"{whole:,}", WIDTH, top + 14, "end"))
        rest = whole - sum(amount for _, amount in pieces[:NUM_SHADES])
        drawn = [(*piece, f"shade{shade}") for shade, piece in enumerate(pieces[:NUM_SHADES], start=1)]
        drawn += [("all others", rest, "rest")] if rest else []
        x = 0.0
        for answer, amount, shade in drawn:
            wide = WIDTH * share(amount, whole)
            parts.append(_piece(answer, amount, whole, x, top + 20, wide, high, shade))
            x += wide
    return svg(WIDTH, max(len(lines) * step, 1), *parts, label="the most frequent answers of each question")


def points(counts: Mapping[tuple[int, int], int], x_name: str, y_name: str, height: int = 420) -> Element:
    """A circle a pair of numbers, its area as often as the pair occurs."""
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
    axis = [_text(f"{tick:,}", x_of(tick), base + 17, "middle") for tick in x_ticks]
    return svg(
        WIDTH,
        height,
        *_horizontal(y_ticks, y_of),
        *axis,
        *circles,
        *_names(x_name, y_name, height),
        label=f"{y_name} by {x_name}",
    )


def _piece(answer: str, amount: int, whole: int, x: float, y: float, wide: float, high: float, shade: str) -> Element:
    """A part of a bar, with its name in it as far as there is room; a drawing of its own, which cuts off the rest."""
    percent = f"{share(amount, whole):.0%}"
    box = node("rect", node("title", f"{answer}: {amount:,} ({percent})"), class_=shade, width="100%", height="100%")
    room = int((wide - 12) / LETTER)
    words = f"{answer} {percent}"
    if len(words) > room:
        words = f"{shown(answer, room - 5)} {percent}" if room >= 12 else percent if room >= len(percent) else ""
    inside = [_text(words, 6, high / 2 + 4, "start", "inside")] if words else []
    return node("svg", box, *inside, x=_n(x), y=_n(y), width=_n(max(wide - 1.5, 0.5)), height=_n(high))


def _horizontal(ticks: Sequence[int], y_of: Callable[[float], float]) -> list[Element]:
    heights = [_n(y_of(tick)) for tick in ticks]
    lines = [node("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid") for y in heights]
    return lines + [_text(f"{tick:,}", LEFT - 8, y_of(tick) + 4, "end") for tick in ticks]


def _names(x_name: str, y_name: str, height: float) -> list[Element]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [_text(x_name, middle, height - 8, "middle", "axis"), _text(y_name, 0, 11, "start", "axis")]


def _text(words: str, x: float, y: float, anchor: str, kind: str = "tick") -> Element:
    return node("text", words, x=_n(x), y=_n(y), text_anchor=anchor, class_=kind)


def _ticks(most: float) -> list[int]:
    """Round numbers from 0 to above the most."""
    raw = max(most, 1) / NUM_TICKS
    power = 10 ** math.floor(math.log10(raw)) if raw >= 1 else 1
    step = next(int(power * times) for times in (1, 2, 5, 10) if power * times >= raw)
    return list(range(0, math.ceil(max(most, 1) / step) * step + 1, step))


def _n(number: float) -> str:
    return f"{number:.1f}"
