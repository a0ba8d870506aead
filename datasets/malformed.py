"""Malformed records: where they are and what is wrong, counted by kind.

Design: the kind is the message without its values, so that 5,000 records with the same mistake are one line. It is made
from the message and not noted where errors are raised, which is in fifty places. The cost: a value that is not
recognised as one makes several kinds of one mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lookonce.errors import RecordsError
from lookonce.text import listed

NUM_PLACES = 3
"""A line names this many records of its kind."""
VALUES = (
    (re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""), "..."),
    (re.compile(r"(?<=, got ).*?(?=; |$)", re.S), "..."),
    (re.compile(r"\d+"), "N"),
)
"""What in a message is a value, and what stands for it in a kind."""


class Malformed(NamedTuple):
    """A record that cannot be read, or a file whose end cannot be."""

    place: str
    """The record: "train.jsonl:12"; or the file."""
    reason: str


@dataclass(frozen=True)
class MalformedKind:
    """Malformed records with the same mistake."""

    kind: str
    """The message, with dots for its values."""
    reason: str
    """The message of the first of them."""
    places: tuple[str, ...]

    def text(self) -> str:
        times = f"{len(self.places):,} times: " if len(self.places) > 1 else ""
        return f"{times}{self.reason} ({listed(self.places, NUM_PLACES)})"


class Collector(list[Malformed]):
    """Collects malformed records: pass it as `broken` to `RecordsFile`."""

    def __call__(self, origin: str, error: RecordsError) -> None:
        self.append(Malformed(origin, str(error).removeprefix(f"{origin}: ")))


def by_kind(malformed: Iterable[Malformed]) -> list[MalformedKind]:
    """The kinds of malformed records, the most frequent first."""
    found: dict[str, list[Malformed]] = {}
    for one in malformed:
        found.setdefault(kind_of(one.reason), []).append(one)
    kinds = [MalformedKind(kind, some[0].reason, tuple(one.place for one in some)) for kind, some in found.items()]
    return sorted(kinds, key=lambda kind: -len(kind.places))


def kind_of(reason: str) -> str:
    """A message without its values."""
    for value, sign in VALUES:
        reason = value.sub(sign, reason)
    return reason
