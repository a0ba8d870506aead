"""One part of a report: what the page shows of it, and its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from lookonce.page.sections import section

EMPTY = "(empty)"
"""What is shown for a text of no characters."""


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


def merged(said: Iterable[tuple[str, str]], num_runs: int) -> list[str]:
    """Sentences on runs, each once with the names of the runs; of a single run no name is needed."""
    names: dict[str, list[str]] = {}
    for name, sentence in said:
        names.setdefault(sentence, []).append(name)
    if num_runs == 1:
        return list(names)
    return [f"{'all runs' if len(some) == num_runs else ', '.join(some)}: {text}" for text, some in names.items()]
