"""A cache in use: pickled, forked, read by several threads, with few open files, and never written to."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
from pathlib import Path

import pytest
import torch

from lookonce.cache.store import reader
from lookonce.cache.store.reader import VisionCache, find_cache, write_index

pytestmark = pytest.mark.usefixtures("no_fsync")


def features_as_bytes(cache: VisionCache) -> dict[str, bytes]:
    return {key: cache[key].numpy().tobytes() for key in cache.keys()}


def many_as_bytes(cache: VisionCache) -> dict[str, bytes]:
    keys = list(cache.keys())
    return {key: one.numpy().tobytes() for key, one in zip(keys, cache.get_many(keys), strict=True)}


def num_open_files(folder: Path) -> int:
    """The number of files below a folder that this process has open."""
    gc.collect()
    links = Path("/proc/self/fd").iterdir()
    return sum(link.is_symlink() and os.path.realpath(link).startswith(str(folder.resolve())) for link in links)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_pickled_cache_reads_the_same(small, indexed):
    if indexed:
        write_index(small.folder, small.fingerprint.sha256)
    cache = VisionCache.open(small.folder)
    assert features_as_bytes(cache) == many_as_bytes(cache) == small.as_bytes
    copy = pickle.loads(pickle.dumps(cache))
    cache.close()
    assert features_as_bytes(copy) == many_as_bytes(copy) == small.as_bytes
    assert (copy.fingerprint, copy.folder) == (small.fingerprint, small.folder)


@pytest.mark.parametrize("end", ["close", "__del__"])
def test_closing_or_deleting_a_cache_closes_its_files(small, end):
    cache = VisionCache.open(small.folder)
    assert num_open_files(small.folder) == 0
    assert many_as_bytes(cache) == small.as_bytes
    assert num_open_files(small.folder) == 2
    if end == "close":
        cache.close()
    else:
        del cache
    assert num_open_files(small.folder) == 0


# Python 3.12 warns when a process with threads forks; torch has some, and the child only reads.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("reads_before", [False, True])
def test_a_forked_process_reads_the_same_and_leaves_the_parents_files_open(small, reads_before):
    cache = VisionCache.open(small.folder)
    if reads_before:
        many_as_bytes(cache)

    def read_and_close() -> None:
        results.put(many_as_bytes(cache))
        cache.close()

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=read_and_close)
    child.start()
    child.join(timeout=20)
    exit_code = child.exitcode
    child.kill()
    assert exit_code == 0
    assert results.get() == small.as_bytes
    assert features_as_bytes(cache) == many_as_bytes(cache) == small.as_bytes


def test_a_file_is_not_closed_while_another_thread_reads_from_it(small, tmp_path, monkeypatch):
    """With one open file each thread evicts those of the others; each read releases the lock halfway."""
    monkeypatch.setattr(reader, "NUM_OPEN", 1)
    preadv = os.preadv

    def slow_preadv(file: int, buffers: list, offset: int) -> int:
        time.sleep(0.0005)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow_preadv)
    small.write_manifest(tmp_path)
    for number, key in enumerate(small.keys):
        small.write_shard(tmp_path, number, {key: small.features[key]})
    cache = VisionCache.open(tmp_path)
    got = cache.get_many(small.keys * 100)
    assert all(torch.equal(one, small.features[key]) for one, key in zip(got, small.keys * 100, strict=True))
    assert num_open_files(tmp_path) == 1


@pytest.mark.parametrize("indexed", [False, True])
def test_a_cache_is_read_without_writing_to_its_folder(small, indexed):
    if indexed:
        write_index(small.folder, small.fingerprint.sha256)
    paths = [small.folder, *(path for path in small.folder.rglob("*"))]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}
    try:
        cache = find_cache(small.folder.parent, small.fingerprint)
        assert many_as_bytes(cache) == small.as_bytes
        cache.close()
        assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths} == before
        assert [small.folder, *small.folder.rglob("*")] == paths
    finally:
        for path in paths:
            path.chmod(0o755)
