"""Near-empty texts, missing values written as text, spaces around answers, and texts that training refuses.

Training refuses texts that contain a special token of the model, since it would act as one (train/data/tokenize.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from lookonce.datasets.audit.findings import Finding, Item, Level, findings_from
from lookonce.datasets.audit.questions import QuestionAnswer
from lookonce.text import count, quoted

MISSING = {"nan", "null", "n/a", "#n/a", "<na>", "nat", "undefined"}
"""Missing values written as text. "none" and "na" are not among them, since they may be answers."""
NO_QUESTION = MISSING | {"none", "na"}
SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]+\|>")
IMAGE_TAG = re.compile(r"<(?:image|video|audio)>", re.IGNORECASE)
"""Tags that other trainers replace with an image; here they would be text."""


def find_texts(questions: Sequence[QuestionAnswer]) -> list[Finding]:
    """Find texts that are wrong by themselves."""
    kinds: tuple[tuple[str, Level, str, Callable[[QuestionAnswer], str]], ...] = (
        (
            "answer-spaces",
            "warning",
            "with spaces or line breaks around the answer, which models learn",
            _spaces,
        ),
        ("special-tokens", "error", "with a special token in its text, which training refuses", _special),
        ("image-marks", "warning", "with an image tag in its text, which would be read as text", _image_tag),
        ("missing-values", "warning", "with a missing value written as text", _missing),
        ("short-questions", "warning", "of fewer than two words", _short_question),
        ("empty-answers", "warning", "with an answer without a letter or a digit", _no_answer),
    )
    return [
        finding
        for code, level, says, text_of in kinds
        for finding in _find(code, level, says, ((text_of(one), one) for one in questions))
    ]


def _find(code: str, level: Level, says: str, found: Iterable[tuple[str, QuestionAnswer]]) -> list[Finding]:
    """Make an item of each distinct text, the most frequent first, with all places where it occurs."""
    items: dict[str, Item] = {}
    for text, one in found:
        if text:
            item = items.setdefault(text, {"text": text, "count": 0, "places": []})
            item["count"] += 1
            item["places"].append(one.origin)
    ordered = sorted(items.values(), key=lambda item: -item["count"])
    number = sum(item["count"] for item in ordered)
    return findings_from(code, level, ordered, f"{count(number, 'question')} {says}", _example, count=number)


def _example(item: Item) -> str:
    more = f" and {item['count'] - 1:,} more" if item["count"] > 1 else ""
    return f"{quoted(item['text'])} ({item['places'][0]}{more})"


def _spaces(one: QuestionAnswer) -> str:
    return one.answer if one.answer != one.answer.strip() else ""


def _special(one: QuestionAnswer) -> str:
    return next((text for text in _texts(one) if SPECIAL_TOKEN.search(text)), "")


def _image_tag(one: QuestionAnswer) -> str:
    return next((text for text in _texts(one) if IMAGE_TAG.search(text)), "")


def _missing(one: QuestionAnswer) -> str:
    question, answer = one.question.strip().casefold(), one.answer.strip().casefold()
    return f"{one.question} {one.answer}" if question in NO_QUESTION or answer in MISSING else ""


def _short_question(one: QuestionAnswer) -> str:
    return one.question if len(one.question.split()) < 2 and not _missing(one) else ""


def _no_answer(one: QuestionAnswer) -> str:
    return "" if any(char.isalnum() for char in one.answer) else one.answer


def _texts(one: QuestionAnswer) -> tuple[str, ...]:
    return one.question, one.answer, one.context[0] or ""
