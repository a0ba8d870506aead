"""Writing past the page cache: the same file, whatever the filesystem and however pieces lie."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from lookonce.cache.store import direct_io as direct
from lookonce.cache.store.direct_io import ALIGNMENT, DirectFile


def aligned(size: int, seed: int = 0) -> memoryview:
    """Random bytes at an address that is a multiple of `ALIGNMENT`."""
    room = np.random.default_rng(seed).integers(0, 256, size + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return memoryview(room[start : start + size])


PIECES = [
    *[(0, 4 * ALIGNMENT), (4 * ALIGNMENT, 1000), (4 * ALIGNMENT + 1000, 3096), (5 * ALIGNMENT, 2 * ALIGNMENT)],
    *[(7 * ALIGNMENT, 1), (7 * ALIGNMENT + 1, 8191), (9 * ALIGNMENT, ALIGNMENT)],
]


@pytest.mark.parametrize("use_direct", [True, False])
def test_pieces_of_any_size_make_up_the_file(tmp_path, use_direct):
    content = aligned(10 * ALIGNMENT)
    file = DirectFile(tmp_path / "a", direct=use_direct)
    for offset, size in reversed(PIECES):
        file.write(content[offset : offset + size], offset)
    file.write(content[:0], 0)
    file.flush()
    file.close()
    assert (tmp_path / "a").read_bytes() == bytes(content)


def test_a_filesystem_that_refuses_direct_writes_gets_ordinary_ones(tmp_path, monkeypatch):
    file = DirectFile(tmp_path / "a")
    write, refused = os.pwrite, []

    def pwrite(descriptor: int, content: memoryview, offset: int) -> int:
        if descriptor != file.descriptor:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, content, offset)

    monkeypatch.setattr(direct.os, "pwrite", pwrite)
    content = aligned(2 * ALIGNMENT)
    file.write(content, 0)
    file.close()
    assert (tmp_path / "a").read_bytes() == bytes(content)
    assert refused == ([0] if file._direct is not None else [])


def test_a_full_disk_is_not_taken_for_a_refusal(tmp_path, monkeypatch):
    file = DirectFile(tmp_path / "a")

    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct.os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        file.write(aligned(ALIGNMENT), 0)
    file.close()


def test_a_file_that_is_there_is_never_written_over(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"


def test_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        DirectFile(tmp_path / "a").close()
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
