"""Candidates in a file: the answers that questions may have.

Design: the file is a mapping in YAML, of which JSON is a part: `{"Is there text?": ["yes", "no"]}`. In YAML, `yes`,
`no` and `3` without quotes are no texts, and are refused, because a guess could differ from the answers of the records.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from lookonce.datasets.formats.checks import is_utf8
from lookonce.errors import UsageError
from lookonce.settings import load_values
from lookonce.text import nfc, quoted

Candidates = dict[str, tuple[str, ...]]
"""The candidates of each question text; both in NFC."""
EXPECTED = 'a mapping of question texts to lists of answers, such as {"Is there text?": ["yes", "no"]}'


def read_candidates(path: Path) -> Candidates:
    """The candidates of each question in NFC, without spaces around them.

    Raises:
        UsageError: the file is missing or not YAML; a list is empty, or has a candidate twice or one that is no text.
    """
    name = f"the file of `eval.candidates` {path}"
    values: dict[Any, Any] = load_values(path, name, "correct the path, or set eval.candidates=training", EXPECTED)
    return {_text(question, name): _candidates(question, given, name) for question, given in values.items()}


def _candidates(question: str, given: Any, name: str) -> tuple[str, ...]:
    where = f"{name}: {quoted(str(question))}"
    if not isinstance(given, list) or not given:
        raise UsageError(f"{where} must have a list of candidates that is not empty; add some, or remove the question")
    numbers = Counter(_text(one, where).strip() for one in given)
    most, number = numbers.most_common(1)[0]
    if number > 1:
        raise UsageError(f"{where} has the candidate {quoted(most)} twice; remove one")
    return tuple(numbers)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: expected a text that is not empty, got {value!r}; write it in quotes")
    if not is_utf8(value):
        raise UsageError(f"{where}: {value!r} holds half a character (a lone surrogate); correct it")
    return nfc(value)
