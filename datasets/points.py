"""Points and boxes in texts: numbers with brackets and names such as `x` or `bbox_2d` around them.

A reference is a point if it is two numbers and a box if it is four (left, top, right, bottom) with nothing else;
"5-10mm" is neither. Names decide what a number is, as in {"x1": 1, "x2": 3, "y1": 2, "y2": 4}; without names, its place
does. Several points or boxes in a text are each in brackets of their own. Of a model's answer, which may have words,
all numbers count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?![\w%]|\.\d|-\d)")
TAG = re.compile(r"</?\|?[A-Za-z]\w*\|?>")
KEYED = re.compile(r"""["'](?:point|bbox)_2d["']\s*:\s*\[([^][]*)\]""")
"""How Qwen's models write a point or a box, beside a label."""
_AXIS = r"\b(?:x|y)(?:[12]|_?(?:min|max))?\b|\b(?:left|top|right|bottom)\b"
NAMED = re.compile(rf"{_AXIS}|\b(?:left|top|right|bottom|point|box|bbox)(?:_2d)?\b", re.I)
AXIS = re.compile(rf"""({_AXIS})["']?\s*+[=:]?\s*+["']?\s*+$""", re.I)
"""The name of a number that follows it."""
AROUND = re.compile(r"[\s\[\](){}\"'=:,]*")
MARKS = re.compile(r"[\[({]|,\s")
"""What makes numbers coordinates, besides names; "1,200" and "1:30" have none of it."""
BRACKETED = re.compile(r"[\[({]([^][(){}]*)[\])}]")
PLACES = {
    name: place
    for place, names in enumerate(("x x1 xmin left", "y y1 ymin top", "x2 xmax right", "y2 ymax bottom"))
    for name in names.split()
}
"""The places of numbers in a point or a box, by their names without `_`."""
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_NEXT = rf"(?:\s*,\s*|\s+){_NUMBER}"
AMONG_WORDS = re.compile(
    rf"[\[({{>]\s*{_NUMBER}(?:{_NEXT}|(?:{_NEXT}){{3}})\s*[\])}}<]"
    rf"""|\bx\d?["']?\s*[=:]\s*["']?{_NUMBER}["']?[\s,;]*["']?y\d?["']?\s*[=:]""",
    re.I,
)
"""Two or four numbers in brackets, or named x and y, in any text."""


class Coordinate(NamedTuple):
    """A number of a point or a box, and where it stands in the text."""

    value: float
    place: int
    """0 x or left, 1 y or top, 2 right, 3 bottom."""
    start: int
    end: int


def find_coordinates(text: str) -> list[list[Coordinate]]:
    """The points and boxes of a text that has nothing else, in the order of their places; none if it has.

    What stands beside the lists of `point_2d` and `bbox_2d`, such as a label, does not matter.
    """
    if keyed := [*KEYED.finditer(text)]:
        found = [_group(text, keyed_list.span(1)) for keyed_list in keyed]
        return found if all(found) else []
    text = TAG.sub(lambda tag: " " * len(tag[0]), text)
    rest, num_names = NAMED.subn("", NUMBER.sub("", text))
    if not AROUND.fullmatch(rest) or not (num_names or MARKS.search(rest)):
        return []
    if whole := _group(text, (0, len(text))):
        return [whole]
    found = [_group(text, bracketed.span(1)) for bracketed in BRACKETED.finditer(text)]
    in_brackets = sum(map(len, found))
    return found if all(found) and in_brackets == len(NUMBER.findall(text)) else []


def _group(text: str, span: tuple[int, int]) -> list[Coordinate]:
    """The two or four numbers of a part of a text; none if it has another number of them, or names that do not fit."""
    found = [*NUMBER.finditer(text, *span)]
    names = [AXIS.search(text, last, number.start()) for last, number in zip(_ends(found, span), found, strict=False)]
    places: Sequence[int] = range(len(found))
    if any(names):  # "10 x 20" has a name for one number alone, and is a size
        if not all(names):
            return []
        places = [PLACES[name[1].lower().replace("_", "")] for name in names if name]
    if len(found) not in (2, 4) or sorted(places) != [*range(len(found))]:
        return []
    numbers = [Coordinate(float(number[0]), place, *number.span()) for number, place in zip(found, places, strict=True)]
    return sorted(numbers, key=lambda number: number.place) if all(math.isfinite(one.value) for one in numbers) else []


def _ends(found: Sequence[re.Match[str]], span: tuple[int, int]) -> list[int]:
    """Where the text before each number begins."""
    return [span[0], *(number.end() for number in found)]


def reference_numbers(text: str) -> tuple[float, ...]:
    """The two or four numbers of a reference that is one point or box; none if it is not."""
    found = find_coordinates(text)
    return tuple(number.value for number in found[0]) if len(found) == 1 else ()


def answer_numbers(text: str) -> tuple[float, ...]:
    """The two or four numbers of an answer; none if it has another number of them."""
    if numbers := reference_numbers(text):
        return numbers
    numbers = tuple(map(float, NUMBER.findall(TAG.sub(" ", text))))
    return numbers if len(numbers) in (2, 4) and all(map(math.isfinite, numbers)) else ()


def has_coordinates(text: str) -> bool:
    """Whether there is a point or a box in a text, also among words, as in "the polyp at (120, 34)"."""
    return bool(find_coordinates(text) or AMONG_WORDS.search(text))
