"""Leave out the records of images that cannot be used, and say which ones.

Design: a record is left out as a whole, since without one of its images it asks about something that is not there. Who
calls this knows which images cannot be used: an audit that has decoded them, or the receipts of a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lookonce.datasets.records import Record
from lookonce.text import count, listed

NUM_NAMED = 5
"""A text names this many images."""
NUM_PLACES = 3
"""A line names this many records of its image."""


@dataclass(frozen=True)
class UnusableImage:
    """An image that cannot be used, and the records that show it."""

    path: Path
    reason: str
    places: tuple[str, ...]

    def text(self) -> str:
        named = "" if f"{self.path}" in self.reason else f"{self.path}: "
        return f"{named}{self.reason} ({listed(self.places, NUM_PLACES)})"


@dataclass(frozen=True)
class LeftOut:
    """How many records were left out, and because of which images."""

    num_records: int
    """Records before any was left out."""
    num_left_out: int
    images: tuple[UnusableImage, ...] = ()

    def text(self, kind: str = "") -> str:
        """A sentence, and a line for each of the first few images; `kind` of records, such as "train "."""
        what = f"{self.num_left_out:,} of {count(self.num_records, f'{kind}record')}"
        return "\n".join([f"left out {what}, which show {count(len(self.images), 'unusable image')}:", *self.lines()])

    def lines(self) -> list[str]:
        """The first few images."""
        rest = len(self.images) - NUM_NAMED
        return [f"  {image.text()}" for image in self.images[:NUM_NAMED]] + (
            [f"  and {rest:,} more"] if rest > 0 else []
        )


def leave_out(records: Iterable[Record], unusable: Mapping[Path, str]) -> tuple[list[Record], LeftOut]:
    """The records whose images can all be used, in order; `unusable` are the reasons why others cannot, by path."""
    kept: list[Record] = []
    places: dict[Path, list[str]] = {}
    records = list(records)
    for record in records:
        broken = [path for path in dict.fromkeys(record.images) if path in unusable]
        for path in broken:
            places.setdefault(path, []).append(record.origin)
        if not broken:
            kept.append(record)
    images = tuple(UnusableImage(path, unusable[path], tuple(some)) for path, some in places.items())
    return kept, LeftOut(len(records), len(records) - len(kept), images)
