"""Several rows of one question about one image.

Design: rows are the same if the image's bytes, the question and the answer are, after the rules; one of them is kept
whatever is asked for. Where the answers differ (Kvasir-VQA has a row for each polyp), `merge` makes one record of them
with all answers as references, the first of which is trained on, and an evaluation calls each of them right; `keep`
leaves a record each; `drop` leaves all of them out, since none of them is known to be the right one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lookonce.datasets.prepare.rows import Row

Policy = Literal["merge", "keep", "drop"]
Group = tuple[Row, ...]
"""The rows that one record is made of, in their order; the answers of the later ones are further references."""


@dataclass(frozen=True)
class Duplicates:
    """What was found, and what became of it."""

    policy: Policy
    num_pairs: int = 0
    """(image, question) pairs with several rows."""
    num_differing_pairs: int = 0
    """Of them those whose answers differ."""
    num_identical: int = 0
    """Rows left out because another one says the same."""
    num_merged: int = 0
    """Rows that became a further reference of another one's record."""
    num_dropped: int = 0
    """Rows left out because the answers differ."""


def join_duplicates(rows: Iterable[Row], policy: Policy) -> tuple[list[Group], Duplicates]:
    """The rows of each record to be, in the order of their first rows."""
    by_pair: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_pair.setdefault((row.key, row.question), []).append(row)
    groups: list[Group] = []
    counts: Counter[str] = Counter()
    for alike in by_pair.values():
        different = _different(alike)
        counts["num_pairs"] += len(alike) > 1
        counts["num_differing_pairs"] += len(different) > 1
        counts["num_identical"] += len(alike) - len(different)
        if len(different) == 1 or policy == "keep":
            groups += [(row,) for row in different]
        elif policy == "merge":
            groups.append(tuple(different))
            counts["num_merged"] += len(different) - 1
        else:
            counts["num_dropped"] += len(different)
    return groups, Duplicates(policy, **counts)


def _different(rows: list[Row]) -> list[Row]:
    """The first row of each answer."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row.answer, row)
    return list(first.values())
