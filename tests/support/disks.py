"""A disk to fill up or make read-only, a limit on the size of files, and file modes that also hold for root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest

VERSION = 0x20080522
IGNORING_MODES = 1 << 1 | 1 << 2
"""The capabilities CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH (capabilities(7))."""


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


@pytest.fixture(scope="module")
def no_fsync() -> Iterator[None]:
    """The tests of a module do not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


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


@pytest.fixture
def with_mode() -> Iterator[Callable[[Path, int], None]]:
    """Sets the mode of a file or a folder, which holds for this process, also for root, until the test ends."""
    before: dict[Path, int] = {}

    def set_mode(path: Path, mode: int) -> None:
        before.setdefault(path, path.stat().st_mode)
        path.chmod(mode)

    with _obeying_modes():
        yield set_mode
    for path, mode in before.items():
        path.chmod(mode)


@contextlib.contextmanager
def _obeying_modes() -> Iterator[None]:
    """Without root's right to ignore modes within the block."""
    if os.geteuid():
        yield
        return
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable capabilities; twice 32 bits
    if not hasattr(libc, "capset") or libc.capget(header, sets):
        pytest.skip("root ignores file modes, and this system has no capabilities that can be dropped")
    effective = sets[0]
    sets[0] = effective & ~IGNORING_MODES
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = effective
        assert libc.capset(header, sets) == 0
