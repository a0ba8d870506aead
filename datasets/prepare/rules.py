"""Cleaning: named rules, each a small pure function of a row's text, each counted.

Design: a dataset definition lists its rules, and they are applied in that order. A rule either leaves a row out or
changes its question or its answer, and sees no other row; duplicates.py handles several rows of one question. Labels
are separated by semicolons: "pink; red" has two. Equal labels are never merged, because "<5mm; <5mm" are two polyps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field

from lookonce.datasets.prepare.rows import Row, text_of
from lookonce.settings import Section
from lookonce.text import nfc

Text = Annotated[str, AfterValidator(nfc)]
"""A text of a YAML file that is compared with those of rows."""

NUM_EXAMPLES = 3
"""How many examples of each rule a report shows."""
SEPARATOR = ";"


# Changes of text.


def replace_words(text: str, words: Mapping[str, str]) -> str:
    """The text with whole words replaced; "lower-right" has two words."""
    if not any(wrong in text for wrong in words):
        return text
    return _any_of(tuple(words)).sub(lambda match: words[match.group()], text)


def replace_labels(text: str, labels: Mapping[str, str]) -> str:
    """The text with whole labels replaced; the spaces around them are kept."""
    parts = text.split(SEPARATOR)
    return SEPARATOR.join(part.replace(part.strip(), labels.get(part.strip(), part.strip())) for part in parts)


def separate_labels(text: str) -> str:
    """The labels with a semicolon and a space between them: `a;b` becomes `a; b`."""
    return f"{SEPARATOR} ".join(part.strip() for part in text.split(SEPARATOR)) if SEPARATOR in text else text


def order_labels(text: str, order: Sequence[str] = ()) -> str:
    """The labels in the given order, the others after them alphabetically; none is removed."""
    if SEPARATOR not in text:
        return text
    rank = {label: number for number, label in enumerate(order)}
    labels = [part.strip() for part in text.split(SEPARATOR)]
    return f"{SEPARATOR} ".join(sorted(labels, key=lambda label: (rank.get(label, len(rank)), label)))


def strip_spaces(text: str) -> str:
    """The text without spaces around it, and with single spaces inside."""
    return " ".join(text.split())


@lru_cache(maxsize=64)
def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")


# The rules of a YAML file.


class _Rule(Section):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    name: Annotated[str, Field(min_length=1)]
    """The rule's name in reports."""

    def apply(self, row: Row) -> Row | None:
        """The row after this rule, or None if it is left out."""
        raise NotImplementedError


class DropRows(_Rule):
    """Leave out rows whose question or answer is one of these; case and outer spaces are ignored."""

    rule: Literal["drop_rows"]
    question: list[Text] = []
    answer: list[Text] = []

    def apply(self, row: Row) -> Row | None:
        return None if _is_one_of(row.question, self.question) or _is_one_of(row.answer, self.answer) else row


class KeepRows(_Rule):
    """Leave out rows whose metadata does not have one of these values."""

    rule: Literal["keep_rows"]
    metadata: str
    values: Annotated[list[Text], Field(min_length=1)]

    def apply(self, row: Row) -> Row | None:
        return row if nfc(text_of(row.metadata.get(self.metadata))) in self.values else None


class _TextRule(_Rule):
    """Changes the text of questions or of answers; a text that it does not change keeps its form of Unicode."""

    field: Annotated[Literal["question", "answer"], Field(alias="in")] = "answer"

    def change(self, text: str) -> str:
        raise NotImplementedError

    def apply(self, row: Row) -> Row | None:
        before = nfc(row.question if self.field == "question" else row.answer)
        after = self.change(before)
        return row if after == before else replace(row, **{self.field: after}, read_as=row.as_read)  # type: ignore[arg-type]


class ReplaceWords(_TextRule):
    """Replace whole words: `{wrong: right}`."""

    rule: Literal["replace_words"]
    words: Annotated[dict[Text, str], Field(min_length=1)]

    def change(self, text: str) -> str:
        return replace_words(text, self.words)


class ReplaceLabels(_TextRule):
    """Replace whole labels, or whole answers: `{wrong: right}`."""

    rule: Literal["replace_labels"]
    labels: Annotated[dict[Text, str], Field(min_length=1)]

    def change(self, text: str) -> str:
        return replace_labels(text, self.labels)


class SeparateLabels(_TextRule):
    """Separate labels by a semicolon and a space."""

    rule: Literal["separate_labels"]

    def change(self, text: str) -> str:
        return separate_labels(text)


class OrderLabels(_TextRule):
    """Put labels into one order: the given one, the others after them alphabetically."""

    rule: Literal["order_labels"]
    order: list[Text] = []

    def change(self, text: str) -> str:
        return order_labels(text, self.order)


class StripSpaces(_TextRule):
    """Remove spaces around the text, and make those inside single."""

    rule: Literal["strip_spaces"]

    def change(self, text: str) -> str:
        return strip_spaces(text)


Rule = Annotated[
    DropRows | KeepRows | ReplaceWords | ReplaceLabels | SeparateLabels | OrderLabels | StripSpaces,
    Field(discriminator="rule"),
]


def _is_one_of(text: str, values: Iterable[str]) -> bool:
    return bool(values) and nfc(text).strip().casefold() in {value.casefold() for value in values}


# Applying rules.


@dataclass
class Tally:
    """How many rows a rule has changed and left out, with examples."""

    name: str
    rule: str
    num_changed: int = 0
    num_dropped: int = 0
    examples: list[list[str]] = field(default_factory=list)
    """The first few different changes, each as text before and after, or question and answer of a row left out."""

    def note(self, before: Row, after: Row | None) -> None:
        if after is None:
            self.num_dropped += 1
            self._show([before.question, before.answer])
        elif after is not before:
            self.num_changed += 1
            question = after.question != before.question
            pair = (before.question, after.question) if question else (before.answer, after.answer)
            self._show(list(pair))

    def _show(self, example: list[str]) -> None:
        if len(self.examples) < NUM_EXAMPLES and example not in self.examples:
            self.examples.append(example)

    def to_json(self) -> dict[str, Any]:
        counts = {"changed": self.num_changed, "dropped": self.num_dropped}
        return {"name": self.name, "rule": self.rule, **counts, "examples": self.examples}


def clean(rows: Iterable[Row], rules: Sequence[Rule]) -> tuple[list[Row], list[Tally]]:
    """The remaining rows in order, and the tally of each rule.

    A last rule leaves out rows whose question or answer is then empty, since a record cannot be empty.
    """
    tallies = [Tally(rule.name, rule.rule) for rule in rules]
    steps: list[tuple[Callable[[Row], Row | None], Tally]] = [
        (rule.apply, tally) for rule, tally in zip(rules, tallies, strict=True)
    ]
    empty = Tally("empty question or answer", "always")
    steps.append((lambda row: row if row.question.strip() and row.answer.strip() else None, empty))
    kept = [row for row in (_through(row, steps) for row in rows) if row is not None]
    return kept, [*tallies, empty]


def _through(row: Row, steps: Sequence[tuple[Callable[[Row], Row | None], Tally]]) -> Row | None:
    for apply, tally in steps:
        after = apply(row)
        tally.note(row, after)
        if after is None:
            return None
        row = after
    return row
