"""Direct writes: the same file on every filesystem, however its content is aligned."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lookonce.cache.format import STORAGE
from lookonce.cache.store.shards import ALIGNMENT, DirectFile, shard_path, write_all


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

    monkeypatch.setattr(os, "pwrite", pwrite)
    content = aligned(2 * ALIGNMENT)
    file.write(content, 0)
    file.close()
    assert (tmp_path / "a").read_bytes() == bytes(content)
    assert refused == ([0] if file._direct is not None else [])


def test_a_full_disk_is_an_error_and_not_retried(tmp_path, monkeypatch):
    file = DirectFile(tmp_path / "a")

    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        file.write(aligned(ALIGNMENT), 0)
    file.close()


def test_an_existing_file_is_never_overwritten(tmp_path):
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


@pytest.mark.parametrize(("dtype", "num_direct"), [("bfloat16", 2), ("fp8_e4m3", 1)])
def test_features_in_whole_pages_bypass_the_page_cache(one_shard, tmp_path, monkeypatch, dtype, num_direct):
    """Scales do not fill a page, so with them the second image begins in the middle of one."""
    direct, opened, pwrite, open_file = [], set(), os.pwrite, os.open

    def open_and_note(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = open_file(path, flags, mode)
        if flags & os.O_DIRECT:
            opened.add(descriptor)
        return descriptor

    def write_and_note(descriptor: int, content: memoryview, offset: int) -> int:
        if descriptor in opened:
            direct.append(offset)
        return pwrite(descriptor, content, offset)

    storage, tensors = STORAGE[dtype], {}
    for key in one_shard.keys[:2]:
        page = torch.frombuffer(mmap.mmap(-1, 2 * ALIGNMENT), dtype=torch.uint8)  # begins at a page
        page.copy_(torch.randint(0, 120, page.shape))
        features = page.view(storage.stored).view(2, one_shard.levels, -1)
        tensors[key] = (features, torch.rand(2, one_shard.levels)) if storage.is_scaled else (features,)
    monkeypatch.setattr(os, "open", open_and_note)
    monkeypatch.setattr(os, "pwrite", write_and_note)
    with one_shard.open_writer(tmp_path, dtype) as writer:
        writer.add(one_shard.stored(tensors))
        writer.commit()
    if not opened:
        pytest.skip(f"the filesystem of {tmp_path} has no direct writes")
    assert len(direct) == num_direct
    one_shard.assert_whole(tmp_path)
    loaded, expected = load_file(shard_path(tmp_path, one_shard.name)), one_shard.named(tensors)
    assert {name: one_shard.bits(tensor) for name, tensor in loaded.items()} == {
        name: one_shard.bits(t) for name, t in expected.items()
    }


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_all_bytes_are_written_even_if_each_call_writes_few(tmp_path, monkeypatch, most):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: pwrite(file, content[:most], offset))
    content = os.urandom(100)
    with (tmp_path / "file").open("wb") as file:
        write_all(file.fileno(), memoryview(content), 5)
        write_all(file.fileno(), memoryview(b""), 50)
    assert (tmp_path / "file").read_bytes() == bytes(5) + content
