"""Plots as SVG: columns, bars cut into shares, and points. Colours are classes of the page's style sheet (style.py)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from xml.etree.ElementTree import Element

from lookonce.page.markup import node, svg
from lookonce.text import one_line, share

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 22, 46
"""The margins, in SVG units; the numbers and names of the axes are in them."""
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
    tallest = max((number for _, number in numbers), default=0)
    ticks = _ticks(tallest)
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
