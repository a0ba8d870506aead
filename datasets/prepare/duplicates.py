"""Several rows of one question about one image.

Design: rows are identical if the image's bytes, the question and the answer are, after the rules; one of them is kept
under every policy. If the answers differ (Kvasir-VQA has a row for each polyp), `merge` makes one record with all
answers as references: the first is trained on, and an evaluation accepts each. `keep` makes one record per answer.
`drop` leaves all of them out, since it is unknown which is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lookonce.datasets.prepare.rows import Row
from lookonce.text import nfc

Policy = Literal["merge", "keep", "drop"]
RecordRows = tuple[Row, ...]
"""The rows that one record is made of, in order; the answers of the later ones are further references."""


@dataclass(frozen=True)
class Duplicates:
    """The duplicates that were found, and their outcome."""

    policy: Policy
    num_pairs: int = 0
    """Pairs of image and question with several rows."""
    num_differing_pairs: int = 0
    """Those pairs whose answers differ."""
    num_identical: int = 0
    """Rows left out because another row is identical."""
    num_merged: int = 0
    """Rows that became a further reference of another row's record."""
    num_dropped: int = 0
    """Rows left out because their answers differ."""


def join_duplicates(rows: Iterable[Row], policy: Policy) -> tuple[list[RecordRows], Duplicates]:
    """The rows of each record, in the order of their first rows."""
    by_pair: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_pair.setdefault((row.key, nfc(row.question)), []).append(row)
    records: list[RecordRows] = []
    counts: Counter[str] = Counter()
    for alike in by_pair.values():
        different = _different(alike)
        counts["num_pairs"] += len(alike) > 1
        counts["num_differing_pairs"] += len(different) > 1
        counts["num_identical"] += len(alike) - len(different)
        if len(different) == 1 or policy == "keep":
            records += [(row,) for row in different]
        elif policy == "merge":
            records.append(tuple(different))
            counts["num_merged"] += len(different) - 1
        else:
            counts["num_dropped"] += len(different)
    return records, Duplicates(policy, **counts)


def _different(rows: list[Row]) -> list[Row]:
    """The first row of each answer."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(nfc(row.answer), row)
    return list(first.values())
