"""Whether an image file is still the one that was hashed: its size and its time of writing.

Design: a stamp only ever raises doubt. Who trusts a plan's keys would have to read all images to know that none has
changed; it compares stamps, hashes those files again that have another one, and the bytes of every image are compared
with its key before it is encoded all the same. A file that was written just before it was hashed has no stamp, since it
may be written once more in the same tick of its filesystem's clock. The cost is a `stat` a file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from lookonce.datasets.archives import by_archive
from lookonce.threads import ahead

Stamp = tuple[int, int]
"""Size in bytes and time of writing in nanoseconds."""
TICK_S = 2
"""No filesystem's clock is coarser."""


def stamps(paths: Iterable[Path]) -> dict[Path, Stamp | None]:
    """The stamp of the file that holds each image: its own, or its archive's; None if it can say nothing."""
    files, members_of = by_archive(paths)
    of_archive = cache(stamp)
    members = {path: of_archive(archive) for archive, paths in members_of.items() for path in paths}
    return dict(zip(files, ahead(stamp, files), strict=True)) | members


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file; None if it is not there or was written a moment ago."""
    with contextlib.suppress(OSError, ValueError):
        found = path.stat()
        if found.st_mtime < time.time() - TICK_S:
            return found.st_size, found.st_mtime_ns
    return None
