"""One part of a report: what the page shows of it, and its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from lookonce.page import section
from lookonce.plots import node
from lookonce.text import shown

MAX_TEXT = 240
"""Characters of a text of a record, or of an answer, that are shown."""


@dataclass(frozen=True)
class Part:
    """One part of a report."""

    key: str
    """Its key in the JSON."""
    title: str
    text: str
    """A short text below the title. If nothing is known, it is all there is, and says why."""
    numbers: Any = None
    """All its numbers, as JSON."""
    content: Sequence[Element] = ()

    def elements(self) -> list[Element]:
        return section(self.title, self.text, *self.content)


def words(text: str) -> str:
    """A text of a record, or an answer, as it is shown: on one line, cut if long, named if there is nothing to see."""
    return shown(text, MAX_TEXT) if text.strip() else "(empty)"


def breakable(text: str) -> Element:
    """A text in a cell that may have a long word, such as a path; it is broken where the table would be too wide."""
    return node("span", text, class_="words")


def merged(said: Iterable[tuple[str, str]], num_runs: int) -> list[str]:
    """Sentences on runs, each once with the names of the runs; of a single run no name is needed."""
    names: dict[str, list[str]] = {}
    for name, sentence in said:
        names.setdefault(sentence, []).append(name)
    if num_runs == 1:
        return [f"{text[0].upper()}{text[1:]}" for text in names]
    return [f"{'All runs' if len(some) == num_runs else ', '.join(some)}: {text}" for text, some in names.items()]
