"""Stamps: the size and times of files, by which changed ones are found without reading them.

Design: size and modification time alone are not trusted, since `cp -p`, rsync and archives set that time. A stamp has
the time of the last status change too (ctime), which the system sets and no program can. So another stamp means that a
file may have changed: one that was copied, moved to another disk, or got other permissions is hashed again, and the
same stamp means the same bytes. A file that was changed just before has no stamp, since it may change again in the same
tick of the filesystem's clock. The bytes of every image are compared with its key before it is encoded anyway. The cost
is one `stat` per file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cache
from itertools import chain
from pathlib import Path
from time import time as now

from lookonce.datasets.archives import by_archive, find_archive
from lookonce.threads import threaded_map

Stamp = tuple[int, int, int]
"""Size in bytes, and the times of the last modification and status change in nanoseconds."""
TICK_S = 2
"""The resolution of the coarsest filesystem clocks."""
NUM_AT_ONCE = 64
"""Number of files that a thread is handed at once: handing one over takes longer than its `stat` on a local disk."""


def stamps(paths: Iterable[Path]) -> dict[Path, Stamp | None]:
    """The stamp of each image's file, or of its archive; None if there is none."""
    files, members_of = by_archive(paths)
    of_archive = cache(stamp)
    members = {path: of_archive(archive) for archive, paths in members_of.items() for path in paths}
    some = [files[start : start + NUM_AT_ONCE] for start in range(0, len(files), NUM_AT_ONCE)]
    found = chain.from_iterable(threaded_map(lambda paths: [stamp(path) for path in paths], some))
    return dict(zip(files, found, strict=True)) | members


def stamp(path: Path) -> Stamp | None:
    """The stamp of a file; None if it does not exist or was changed a moment ago."""
    with contextlib.suppress(OSError, ValueError):
        found = path.stat()
        if max(found.st_mtime, found.st_ctime) < now() - TICK_S:
            return found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return None


def is_gone(path: Path) -> bool:
    """Whether an image's file, or its archive, does not exist or cannot be reached."""
    try:
        (find_archive(path) or path).stat()
    except (OSError, ValueError):
        return True
    return False
