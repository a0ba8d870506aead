"""Texts that say next to nothing, missing values written out, spaces, and what a training would refuse.

Training refuses texts that hold one of the model's special tokens, which would be read as one (train/data/tokenize.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from lookonce.datasets.audit.findings import Finding, Item, Level, find
from lookonce.datasets.audit.questions import Asked
from lookonce.text import count, quoted

MISSING = {"nan", "null", "n/a", "#n/a", "<na>", "nat", "undefined"}
"""Written-out missing values; "none" and "na" may be an answer."""
NO_QUESTION = MISSING | {"none", "na"}
SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
MARK = re.compile(r"<(?:image|video|audio)>", re.IGNORECASE)
"""Where other trainers put an image; here it would be text."""


def find_texts(questions: Sequence[Asked]) -> list[Finding]:
    """Texts that are wrong in themselves."""
    kinds: tuple[tuple[str, Level, str, Callable[[Asked], str]], ...] = (
        ("answer-spaces", "warning", "with spaces or line ends around the answer, which a model would learn", _spaces),
        ("special-tokens", "error", "with a special token in its text, which training refuses", _special),
        ("image-marks", "warning", "with a mark for an image in its text, which would be read as text", _mark),
        ("missing-values", "warning", "with a missing value written out as text", _missing),
        ("short-questions", "warning", "of fewer than two words", _short_question),
        ("empty-answers", "warning", "with an answer without a letter or a digit", _no_answer),
    )
    return [
        finding
        for code, level, says, text_of in kinds
        for finding in _find(code, level, says, ((text_of(one), one) for one in questions))
    ]


def _find(code: str, level: Level, says: str, found: Iterable[tuple[str, Asked]]) -> list[Finding]:
    """One item a different text, most frequent first, with the first place where it stands."""
    items: dict[str, Item] = {}
    for text, one in found:
        if text:
            item = items.setdefault(text, {"text": text, "count": 0, "places": []})
            item["count"] += 1
            item["places"].append(one.place)
    ordered = sorted(items.values(), key=lambda item: -item["count"])
    number = sum(item["count"] for item in ordered)
    return find(code, level, ordered, f"{count(number, 'question')} {says}", _example, count=number)


def _example(item: Item) -> str:
    more = f" and {item['count'] - 1:,} more" if item["count"] > 1 else ""
    return f"{quoted(item['text'])} ({item['places'][0]}{more})"


def _spaces(one: Asked) -> str:
    return one.answer if one.answer != one.answer.strip() else ""


def _special(one: Asked) -> str:
    return next((text for text in _texts(one) if SPECIAL_TOKEN.search(text)), "")


def _mark(one: Asked) -> str:
    return next((text for text in _texts(one) if MARK.search(text)), "")


def _missing(one: Asked) -> str:
    question, answer = one.question.strip().casefold(), one.answer.strip().casefold()
    return f"{one.question} {one.answer}" if question in NO_QUESTION or answer in MISSING else ""


def _short_question(one: Asked) -> str:
    return one.question if len(one.question.split()) < 2 and not _missing(one) else ""


def _no_answer(one: Asked) -> str:
    return "" if any(char.isalnum() for char in one.answer) else one.answer


def _texts(one: Asked) -> tuple[str, ...]:
    return one.question, one.answer, one.before[0] or ""
