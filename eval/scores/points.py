"""Answers that are points: inside the reference box, or at which distance from the reference point.

Design: a reference is a point if it is two numbers and a box if it is four (left, top, right, bottom), with brackets
and names such as `x` or `bbox_2d` around them and nothing else; "5-10mm" is neither. Of an answer, in which a model may
add words, all numbers count: two are a point, four a box, of which the centre is the point (SeeClick, arXiv 2401.10935,
whose ScreenSpot counts the points inside the box). Answer and reference must be in the same units; distances are in
these units, which are pixels if the records say pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

Point = tuple[float, float]
Box = tuple[float, float, float, float]

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?![\w%]|\.\d|-\d)")
TAG = re.compile(r"</?\|?[A-Za-z]\w*\|?>")
KEYED = re.compile(r'"(?:point|bbox)_2d"\s*:\s*\[([^]]*)\]')
"""How Qwen's models write a point or a box, beside a label."""
NAMES = re.compile(r"\b(?:x|y)(?:[12]|_(?:min|max))?\b|\b(?:left|top|right|bottom|point|box|bbox)(?:_2d)?\b", re.I)
AROUND = re.compile(r"[\s\[\](){}\"'=:,]*")
MARKS = re.compile(r"[\[({]|,\s")
"""What makes numbers coordinates, besides names; "1,200" and "1:30" have none of it."""


def reference_numbers(text: str) -> tuple[float, ...]:
    """The two or four numbers of a reference that has nothing else; none if it is not a point or a box."""
    text = _core(text)
    rest, num_names = NAMES.subn("", NUMBER.sub("", text))
    return _numbers(text) if AROUND.fullmatch(rest) and (num_names or MARKS.search(rest)) else ()


def answer_point(text: str) -> Point | None:
    """The point of an answer: its two numbers, or the centre of its four."""
    numbers = _numbers(_core(text))
    if len(numbers) == 4:
        return (numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2
    return (numbers[0], numbers[1]) if numbers else None


def reference_boxes(references: Sequence[str]) -> list[Box]:
    """The references as boxes; empty unless all are."""
    found = [reference_numbers(text) for text in references]
    return [(a, b, c, d) for a, b, c, d in found] if all(len(numbers) == 4 for numbers in found) else []


def reference_points(references: Sequence[str]) -> list[Point]:
    """The references as points; empty unless all are."""
    found = [reference_numbers(text) for text in references]
    return [(x, y) for x, y in found] if all(len(numbers) == 2 for numbers in found) else []


def is_inside(given: str, references: Sequence[str]) -> bool:
    """Whether the answer's point is in one of the reference boxes, or on its edge."""
    point = answer_point(given)
    return point is not None and any(_holds(box, point) for box in reference_boxes(references))


def distance(given: str, references: Sequence[str]) -> float | None:
    """The distance to the nearest reference point; None if the answer is not a point."""
    point = answer_point(given)
    return None if point is None else min(math.dist(point, other) for other in reference_points(references))


def _holds(box: Box, point: Point) -> bool:
    (left, right), (top, bottom) = sorted(box[::2]), sorted(box[1::2])
    return left <= point[0] <= right and top <= point[1] <= bottom


def _core(text: str) -> str:
    keyed = KEYED.findall(text)
    return f"[{keyed[0]}]" if len(keyed) == 1 else TAG.sub(" ", text)


def _numbers(text: str) -> tuple[float, ...]:
    numbers = tuple(map(float, NUMBER.findall(text)))
    return numbers if len(numbers) in (2, 4) and all(map(math.isfinite, numbers)) else ()
