"""Points and boxes in texts: numbers with brackets and names such as `x` or `bbox_2d` around them.

A reference is a point if it is two numbers and a box if it is four (left, top, right, bottom) with nothing else;
"5-10mm" is neither. Of an answer, in which a model may add words, all numbers count.
"""

from __future__ import annotations

import math
import re

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?![\w%]|\.\d|-\d)")
TAG = re.compile(r"</?\|?[A-Za-z]\w*\|?>")
KEYED = re.compile(r'"(?:point|bbox)_2d"\s*:\s*\[([^]]*)\]')
"""How Qwen's models write a point or a box, beside a label."""
NAMED = re.compile(r"\b(?:x|y)(?:[12]|_(?:min|max))?\b|\b(?:left|top|right|bottom|point|box|bbox)(?:_2d)?\b", re.I)
AROUND = re.compile(r"[\s\[\](){}\"'=:,]*")
MARKS = re.compile(r"[\[({]|,\s")
"""What makes numbers coordinates, besides names; "1,200" and "1:30" have none of it."""


def reference_numbers(text: str) -> tuple[float, ...]:
    """The two or four numbers of a reference that has nothing else; none if it is not a point or a box."""
    text = _core(text)
    rest, num_names = NAMED.subn("", NUMBER.sub("", text))
    return _numbers(text) if AROUND.fullmatch(rest) and (num_names or MARKS.search(rest)) else ()


def answer_numbers(text: str) -> tuple[float, ...]:
    """The two or four numbers of an answer; none if it has another number of them."""
    return _numbers(_core(text))


def _core(text: str) -> str:
    keyed = KEYED.findall(text)
    return f"[{keyed[0]}]" if len(keyed) == 1 else TAG.sub(" ", text)


def _numbers(text: str) -> tuple[float, ...]:
    numbers = tuple(map(float, NUMBER.findall(text)))
    return numbers if len(numbers) in (2, 4) and all(map(math.isfinite, numbers)) else ()
