"""Writing a shard: commit, failures, leftovers, and two workers with the same shard."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lookonce.cache.store import shards
from lookonce.cache.store.metadata import has_receipt
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import MAX_UNWRITTEN, remove_leftovers, shard_path
from lookonce.files import TEMPORARY_MARK


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_writer_that_does_not_commit_leaves_nothing(one_shard, tmp_path, error):
    with contextlib.suppress(*([error] if error else [])), one_shard.open_writer(tmp_path) as writer:
        writer.add(one_shard.stored(one_shard.random_tensors("float32")))
        assert len(one_shard.files(tmp_path)) == 1
        if error:
            raise error
    assert one_shard.files(tmp_path) == []


def test_leftovers_of_killed_writers_are_ignored_and_removed_shard_by_shard(one_shard, tmp_path):
    one_shard.write_cache(tmp_path)
    whole = one_shard.files(tmp_path)
    for name in (one_shard.name, "shard-10000", "shard-100000"):
        shard_path(tmp_path, name).with_suffix(f".safetensors{TEMPORARY_MARK}host-1-abcdef01").touch()
    assert len(VisionCache.open(tmp_path)) == len(one_shard.grids)
    remove_leftovers(tmp_path, "shard-10000")
    left = [Path(name).name.split(".")[0] for name in one_shard.files(tmp_path) if TEMPORARY_MARK in name]
    assert left == [one_shard.name, "shard-100000"]
    for name in left:
        remove_leftovers(tmp_path, name)
    assert one_shard.files(tmp_path) == whole


def test_writing_leaves_no_temporary_file(one_shard, tmp_path):
    one_shard.write_cache(tmp_path)
    assert one_shard.files(tmp_path) == [
        "manifest.json",
        f"receipts/{one_shard.name}.json",
        f"shards/{one_shard.name}.safetensors",
    ]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_file_modes_follow_the_umask(one_shard, tmp_path, umask, mask):
    os.umask(mask)
    one_shard.write_cache(tmp_path)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in one_shard.files(tmp_path)} == {0o666 & ~mask}
    assert os.umask(mask) == mask


def test_a_finished_shard_is_not_replaced(one_shard, tmp_path):
    one_shard.write_cache(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in one_shard.files(tmp_path)}
    with one_shard.open_writer(tmp_path) as writer:
        writer.add(one_shard.stored(one_shard.random_tensors("float32", seed=1)))
        assert not writer.commit()
    assert {name: (tmp_path / name).read_bytes() for name in one_shard.files(tmp_path)} == before


class Turns:
    """Lets two threads run step by step in a given order: a thread runs until it asks for its next turn."""

    def __init__(self, order: str) -> None:
        self._order, self._changed, self._ended = list(order), threading.Condition(), set[str]()
        self._running: str | None = None

    def step(self) -> None:
        name = threading.current_thread().name
        if name not in "AB":
            return
        with self._changed:
            self._leave(name)
            self._changed.wait_for(lambda: self._running is None and self._order[0] == name, timeout=30)
            self._running = self._order.pop(0)

    def end(self) -> None:
        name = threading.current_thread().name
        with self._changed:
            self._ended.add(name)
            self._leave(name)

    def _leave(self, name: str) -> None:
        if self._running == name:
            self._running = None
        while self._order and self._order[0] in self._ended:
            self._order.pop(0)
        self._changed.notify_all()


ORDERS = sorted({"".join(order) for order in itertools.permutations("AAABBB")})


@pytest.mark.parametrize("order", ORDERS)
def test_two_writers_of_one_shard_leave_one_receipt_that_matches_the_file(one_shard, tmp_path, monkeypatch, order):
    """Each checks for a receipt, renames its file and writes its receipt; all orders of these steps are tried."""
    turns = Turns(order)

    def in_turn(function):
        def wait(*arguments):
            turns.step()
            return function(*arguments)

        return wait

    monkeypatch.setattr(shards, "has_receipt", in_turn(has_receipt))
    monkeypatch.setattr(os, "replace", in_turn(os.replace))
    monkeypatch.setattr(shards, "write_receipt", in_turn(shards.write_receipt))
    # The last step includes what follows if there already is a receipt, so that takes no turn.
    monkeypatch.setattr(shards, "write_text", lambda path, text: path.write_text(text))
    one_shard.write_manifest(tmp_path)
    tensors = {name: one_shard.random_tensors("float32", seed) for seed, name in enumerate("AB")}
    won = {}

    def commit(name: str) -> None:
        try:
            won[name] = writers[name].commit()
        finally:
            turns.end()

    with contextlib.ExitStack() as stack:
        writers = {name: stack.enter_context(one_shard.open_writer(tmp_path)) for name in "AB"}
        for name, writer in writers.items():
            writer.add(one_shard.stored(tensors[name]))
            writer.wait()
        threads = [threading.Thread(target=commit, args=(name,), name=name) for name in "AB"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert sorted(won.values()) == [False, True]
    one_shard.assert_whole(tmp_path)
    cache = VisionCache.open(tmp_path)
    found = {key: one_shard.bits(cache[key]) for key in one_shard.grids}
    assert found in [{key: one_shard.bits(*tensors) for key, tensors in tensors[name].items()} for name in "AB"]
    assert len(one_shard.files(tmp_path)) == 3


def fail_to_write(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_write_is_raised_by_an_add_soon_after_and_leaves_nothing(one_shard, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", fail_to_write)
    images = one_shard.stored(one_shard.random_tensors("float32"))
    with pytest.raises(OSError, match="No space left"), one_shard.open_writer(tmp_path) as writer:
        for _ in range(MAX_UNWRITTEN + 1):
            writer.add(images)
    assert one_shard.files(tmp_path) == []


def test_a_failed_write_is_raised_by_commit_at_the_latest_and_leaves_nothing(one_shard, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", fail_to_write)
    with pytest.raises(OSError, match="No space left"), one_shard.open_writer(tmp_path) as writer:
        writer.add(one_shard.stored(one_shard.random_tensors("float32")))
        writer.commit()
    assert one_shard.files(tmp_path) == []


def test_a_header_that_cannot_be_written_leaves_nothing(one_shard, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="No space left"), one_shard.open_writer(tmp_path) as writer:
        writer.add(one_shard.stored(one_shard.random_tensors("float32")))
        writer.wait()
        monkeypatch.setattr(os, "pwrite", fail_to_write)
        writer.commit()
    assert one_shard.files(tmp_path) == []
