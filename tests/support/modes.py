"""File modes that also hold for root, who may otherwise read and write everything."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

VERSION = 0x20080522
IGNORING_MODES = 1 << 1 | 1 << 2
"""The capabilities CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH (capabilities(7))."""


@pytest.fixture
def with_mode() -> Iterator[Callable[[Path, int], None]]:
    """Sets the mode of a file or a folder, which holds for this process until the test ends."""
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
