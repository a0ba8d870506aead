"""What readers of files give: rows as they lie there, in portions.

Design: a portion is about two thousand rows, the unit in which an interrupted run goes on: some row groups of a parquet
file, a tar file, a stretch of another file. Portions are named before they are read, and always in the same order.
Embedded images are bytes as they lie in the file, never decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.datasets.prepare.definition import Definition
from lookonce.errors import RecordsError

PORTION_ROWS = 2000
BUFFER_BYTES = 1 << 20
"""Of a large file, read at once."""


@dataclass(frozen=True)
class RawRow:
    """One row as it lies there."""

    values: dict[str, Any]
    image: bytes | None
    """The embedded image."""
    origin: str


@dataclass(frozen=True)
class Portion:
    """Some rows that are read together."""

    name: str
    read: Callable[[], Iterable[RawRow]]
    num_rows: int | None = None
    """None if only reading tells."""


Reader = Callable[[Path, str, Definition], Iterator[Portion]]
"""The portions of a file, given its path, its name for messages, and the set's definition."""


def broken(name: str, error: object) -> RecordsError:
    """The error for a file that can not be read."""
    text = str(error).partition("\n")[0] or type(error).__name__
    return RecordsError(f"{name} can not be read ({text}); is it whole? Download or copy it again")
