"""A disk that tests may fill up or make read-only, and a limit on the size of files."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Disk:
    """A file system of 40 MB."""

    folder: Path

    @property
    def free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self, leave: int) -> Path:
        """Fill it up to `leave` free bytes, with a file that may be deleted."""
        ballast = self.folder / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free - leave)
        return ballast

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(command, capture_output=True).returncode == 0:
            yield Disk(place)
            subprocess.run(["umount", str(place)], check=True)
            return
    pytest.skip("a file system cannot be mounted here, since that takes root")


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """Sets a limit on the size of files within a block, as `ulimit -f` does."""

    @contextlib.contextmanager
    def limited(num_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
