"""Large writes past the page cache, where the filesystem allows it.

Features are written once and read hours later, if at all by this machine: copying them into the page cache first costs
memory bandwidth, throws out what others keep there, and leaves the disk idle until the flush at the end. On an H200's
local disk, gigabytes a second into one file, flushed: 2.2 directly, 1.5 through the page cache. Direct writes ask for
addresses, offsets and lengths that are multiples of 4,096; features of real models come so (a token has 16 or 32 kB).
What does not, goes through the page cache as ever.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import numpy as np

ALIGNMENT = 4096


class DirectFile:
    """A new file that is written at any offset by any number of threads."""

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        """Create `path`.

        Raises:
            OSError: it can not be created, or is there already.
        """
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._direct: int | None = None
        if direct and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # the filesystem has no such thing
                self._direct = os.open(path, os.O_RDWR | os.O_DIRECT)

    def write(self, content: memoryview, offset: int) -> None:
        """Write all of `content`; done when it is on the disk, or in the page cache."""
        if self._direct is not None and _is_aligned(content, offset):
            try:
                return write_all(self._direct, content, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # which says that this filesystem wants more than 4,096
                    raise
        write_all(self.descriptor, content, offset)

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self.descriptor)

    def close(self) -> None:
        for descriptor in (self.descriptor, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def write_all(descriptor: int, content: memoryview, offset: int) -> None:
    """`os.pwrite` until all is written: one call takes 2 GiB at most."""
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def _is_aligned(content: memoryview, offset: int) -> bool:
    address = np.frombuffer(content, np.uint8).ctypes.data if content else 0
    return (offset | len(content) | address) % ALIGNMENT == 0
