"""Tar files, read by webdataset: their members, or WebDataset samples of members with the same key.

Design: a file is streamed through once, with one member or one sample in memory. The cost: reading the last member
reads the whole file, about half a second per gigabyte that the system has cached.

webdataset takes long to import and is imported when the first file is opened.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

BUFFER_BYTES = 1 << 20
DAMAGED = (ValueError, KeyError, OSError, EOFError, tarfile.TarError)
"""What webdataset raises for damaged files."""
NUM_PEEKED = 16
"""A sample's JSON member is expected among this many first members."""


def read_members(path: Path, select: Callable[[str], bool] | None = None) -> Generator[tuple[str, bytes]]:
    """Names and bytes of all members, or of those whose names `select` accepts; links and folders are skipped."""
    from webdataset.tariterators import tar_file_iterator

    with path.open("rb", buffering=BUFFER_BYTES) as file:
        for member in tar_file_iterator(file, skip_meta=None, select_files=select):
            yield member["fname"], member["data"]


def read_samples(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Samples: `__key__`, `__url__` (which is `name`), and the bytes of each member by its suffix."""
    from webdataset.tariterators import group_by_keys

    with closing(read_members(path)) as members:
        yield from group_by_keys({"fname": member, "data": data, "__url__": name} for member, data in members)


def has_json(path: Path) -> bool:
    """Whether a tar file has samples with JSON, not images alone; True for a damaged one, so that reading it fails."""
    try:
        with closing(read_members(path)) as members:
            return any(name.endswith(".json") for name, _ in islice(members, NUM_PEEKED))
    except DAMAGED:
        return True
