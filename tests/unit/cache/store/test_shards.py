"""Shards on disk: what was written is there bit for bit, any reader of safetensors finds it, only a receipt counts."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from lookonce.cache.store import shards
from lookonce.cache.store.dtypes import SCALE_SUFFIX, STORAGE
from lookonce.cache.store.fingerprint import Fingerprint, raw_bytes
from lookonce.cache.store.plan import MAX_IMAGES
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.receipts import Failure, Grid, Receipt, has_receipt, read_receipt, receipt_path
from lookonce.cache.store.shards import (
    ALIGNMENT,
    Packed,
    ShardWriter,
    read_header,
    remove_leftovers,
    shard_path,
    write_all,
)
from lookonce.files import TEMPORARY_MARK, write_json

NAME = "shard-00000"
LEVELS, HIDDEN = 4, 8
GRIDS: dict[str, Grid] = {
    sha256(name.encode()).hexdigest(): grid for name, grid in {"a": (1, 4, 4), "b": (1, 2, 2), "c": (1, 6, 10)}.items()
}
KEYS = list(GRIDS)
MAX_HEADER_BYTES = 100_000_000
"""That the safetensors library reads."""


def make_fingerprint(dtype: str) -> Fingerprint:
    return Fingerprint(2, "0" * 64, {"out_hidden_size": HIDDEN}, {}, LEVELS, dtype)


def write_manifest(folder: Path, dtype: str = "float32") -> None:
    fingerprint = make_fingerprint(dtype)
    manifest = {"format_version": 2, "fingerprint": fingerprint.to_json(), "sha256": fingerprint.sha256}
    write_json(folder / "manifest.json", manifest)


def random_parts(dtype: str, seed: int = 0) -> dict[str, tuple[torch.Tensor, ...]]:
    """What is stored of each image. Every bit pattern may occur: NaNs, infinities, negative zero."""
    storage, generator = STORAGE[dtype], torch.Generator().manual_seed(seed)
    parts = {}
    for key, (t, h, w) in GRIDS.items():
        num_tokens = t * h * w // 4
        shape = (num_tokens, LEVELS, HIDDEN * storage.stored.itemsize)
        features = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(storage.stored)
        scale = torch.rand(num_tokens, LEVELS, generator=generator)
        parts[key] = (features, scale) if storage.is_scaled else (features,)
    return parts


def pack(parts: Mapping[str, tuple[torch.Tensor, ...]]) -> list[Packed]:
    return [Packed(key, GRIDS[key], tensors, (1.0,) * LEVELS, (2.0,) * LEVELS) for key, tensors in parts.items()]


def open_writer(folder: Path, dtype: str = "float32", name: str = NAME) -> ShardWriter:
    return ShardWriter(folder, name, make_fingerprint(dtype), len(GRIDS))


def write_cache(folder: Path, dtype: str = "float32", seed: int = 0) -> dict[str, tuple[torch.Tensor, ...]]:
    """A cache of one shard, written in two goes; gives what was written."""
    parts = random_parts(dtype, seed)
    write_manifest(folder, dtype)
    with open_writer(folder, dtype) as writer:
        packed = pack(parts)
        writer.add(packed[:1])
        writer.add(packed[1:])
        assert writer.commit()
    return parts


def bits(*tensors: torch.Tensor) -> bytes:
    return b"".join(bytes(raw_bytes(tensor)) for tensor in tensors)


def named(parts: Mapping[str, tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    """As the tensors of a safetensors file."""
    suffixes = "", SCALE_SUFFIX
    return {key + suffix: part for key, both in parts.items() for part, suffix in zip(both, suffixes, strict=False)}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def assert_whole(folder: Path, name: str = NAME) -> Receipt:
    """The shard is, to the last byte, what its receipt says."""
    content, receipt = shard_path(folder, name).read_bytes(), read_receipt(folder, name)
    assert len(content) == receipt.size_bytes
    assert xxhash.xxh3_64_hexdigest(content[: receipt.header_bytes]) == receipt.header_xxh3_64
    for entry in receipt.images.values():
        found = content[entry.offset : entry.offset + entry.size_bytes]
        assert xxhash.xxh3_64_hexdigest(found) == entry.xxh3_64
    return receipt


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("dtype", STORAGE)
def test_features_come_back_bit_for_bit(tmp_path, dtype):
    written = write_cache(tmp_path, dtype)
    cache = VisionCache.open(tmp_path)
    assert set(cache.keys()) == written.keys()
    for key, (stored, *scale) in written.items():
        expected = STORAGE[dtype].unpack(stored, *scale or [None])
        assert (cache[key].dtype, cache[key].shape) == (STORAGE[dtype].compute, stored.shape)
        assert bits(cache[key]) == bits(expected)
        assert cache.grid_thw(key) == GRIDS[key]


@pytest.mark.parametrize("dtype", STORAGE)
def test_plain_safetensors_reads_the_same_tensors(tmp_path, dtype):
    expected = named(write_cache(tmp_path, dtype))
    loaded = load_file(shard_path(tmp_path, NAME))
    with safe_open(shard_path(tmp_path, NAME), framework="pt") as file:
        assert set(file.keys()) == loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            for found in (file.get_tensor(name), loaded[name]):
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert bits(found) == bits(tensor)


@pytest.mark.parametrize("dtype", STORAGE)
def test_a_shard_describes_itself(tmp_path, dtype):
    write_cache(tmp_path, dtype)
    with safe_open(shard_path(tmp_path, NAME), framework="pt") as file:
        metadata = file.metadata()
    assert {key: tuple(grid) for key, grid in json.loads(metadata.pop("grid_thw")).items()} == GRIDS
    assert metadata == {
        "format": "lookonce-features",
        "format_version": "2",
        "fingerprint": make_fingerprint(dtype).sha256,
    }


@pytest.mark.parametrize("dtype", STORAGE)
def test_images_follow_one_another_from_a_whole_page_to_the_end_of_the_file(tmp_path, dtype):
    written = write_cache(tmp_path, dtype)
    content, receipt = shard_path(tmp_path, NAME).read_bytes(), assert_whole(tmp_path)
    header, start = read_header(shard_path(tmp_path, NAME))
    assert start == receipt.header_bytes and start % ALIGNMENT == 0
    place = start
    for key, parts in written.items():
        entry = receipt.images[key]
        assert (entry.offset, entry.size_bytes) == (place, len(bits(*parts)))
        assert content[place : place + entry.size_bytes] == bits(*parts)
        for name, part in named({key: parts}).items():
            assert header[name]["data_offsets"] == [place - start, place - start + part.nbytes]
            place += part.nbytes
    assert place == len(content) == receipt.size_bytes


@pytest.mark.parametrize("dtype", STORAGE)
def test_bytes_of_an_image_are_as_many_as_planned(tmp_path, dtype):
    write_cache(tmp_path, dtype)
    for entry in read_receipt(tmp_path, NAME).images.values():
        assert entry.size_bytes == entry.num_tokens * make_fingerprint(dtype).bytes_per_token


@pytest.mark.parametrize(
    ("dtype", "golden"),
    [
        ("bfloat16", "c7501738faaa39a3dd5ce6f60250f77d4b3ee48c45d98501baec193d78d9122e"),
        ("float32", "44797cfab9f9548daee61bdb961368250effa1dfdbd3ccdff2a942ca09164efb"),
        ("fp8_e4m3", "c960529cabed308a1f3516a73e4a18a1133285950fed0244e8e73a1fc64ac137"),
    ],
)
def test_the_bytes_of_a_shard_do_not_drift(tmp_path, dtype, golden):
    storage = STORAGE[dtype]
    with open_writer(tmp_path, dtype) as writer:
        for key, (t, h, w) in reversed(GRIDS.items()):
            values = torch.arange(t * h * w // 4 * LEVELS * HIDDEN).view(-1, LEVELS, HIDDEN) % 97 - 48
            writer.add([Packed(key, (t, h, w), storage.pack(values.to(storage.compute)), (), ())])
        writer.commit()
    assert sha256(shard_path(tmp_path, NAME).read_bytes()).hexdigest() == golden


def test_a_receipt_says_what_was_written(tmp_path):
    written = write_cache(tmp_path)
    receipt = assert_whole(tmp_path)
    assert (receipt.shard, receipt.fingerprint) == (NAME, make_fingerprint("float32").sha256)
    assert 0 <= receipt.seconds < 60
    assert list(receipt.images) == sorted(GRIDS)
    for key, entry in receipt.images.items():
        assert (entry.num_tokens, entry.grid_thw) == (len(written[key][0]), GRIDS[key])
        assert (entry.norms, entry.peaks) == ((1.0,) * LEVELS, (2.0,) * LEVELS)


def test_a_receipt_says_which_images_failed_and_why(tmp_path):
    failures = {KEYS[2]: Failure("c.jpg", "cut short", retry=True), KEYS[1]: Failure("b.jpg", "no image")}
    with open_writer(tmp_path) as writer:
        writer.add(pack(random_parts("float32"))[:1])
        writer.failed |= failures
        writer.commit()
    receipt = assert_whole(tmp_path)
    assert list(receipt.images) == KEYS[:1]
    assert receipt.failed == failures and list(receipt.failed) == sorted(failures)


def test_noncontiguous_features_are_written_as_they_read(tmp_path):
    write_manifest(tmp_path)
    features = torch.randn(HIDDEN, LEVELS, 4).permute(2, 1, 0)
    with open_writer(tmp_path) as writer:
        writer.add(pack({KEYS[0]: (features,)}))
        writer.commit()
    assert torch.equal(VisionCache.open(tmp_path)[KEYS[0]], features)


@pytest.mark.parametrize(("dtype", "num_direct"), [("bfloat16", 2), ("fp8_e4m3", 1)])
def test_whole_pages_go_past_the_page_cache_and_what_does_not_fill_them_beside_them(
    tmp_path, monkeypatch, dtype, num_direct
):
    """With scales, which fill no page, the second image begins in the middle of one."""
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

    storage, parts = STORAGE[dtype], {}
    for key in KEYS[:2]:
        page = torch.frombuffer(mmap.mmap(-1, 2 * ALIGNMENT), dtype=torch.uint8)  # begins where a page does
        page.copy_(torch.randint(0, 120, page.shape))
        features = page.view(storage.stored).view(2, LEVELS, -1)
        parts[key] = (features, torch.rand(2, LEVELS)) if storage.is_scaled else (features,)
    monkeypatch.setattr(os, "open", open_and_note)
    monkeypatch.setattr(os, "pwrite", write_and_note)
    with open_writer(tmp_path, dtype) as writer:
        writer.add(pack(parts))
        writer.commit()
    if not opened:
        pytest.skip(f"the filesystem of {tmp_path} has no direct writes")
    assert len(direct) == num_direct
    assert_whole(tmp_path)
    loaded, expected = load_file(shard_path(tmp_path, NAME)), named(parts)
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {name: bits(t) for name, t in expected.items()}


def test_features_may_change_once_their_writes_are_done(tmp_path):
    write_manifest(tmp_path)
    parts = random_parts("float32")
    before = {key: bits(*tensors) for key, tensors in parts.items()}
    with open_writer(tmp_path) as writer:
        for write in writer.add(pack(parts)):
            write.result()
        for [features] in parts.values():
            features.zero_()
        writer.commit()
    cache = VisionCache.open(tmp_path)
    assert {key: bits(cache[key]) for key in before} == before


def test_a_shard_of_no_images_counts_and_is_plain_safetensors(tmp_path):
    with open_writer(tmp_path) as writer:
        assert writer.commit()
    assert assert_whole(tmp_path).images == {}
    assert load_file(shard_path(tmp_path, NAME)) == {}


def test_the_header_has_room_for_as_many_images_as_a_shard_may_have_and_the_longest_numbers(tmp_path):
    """A grid for each tensor is the worst: with scales two tensors share one."""
    parts = (torch.empty(0, 99, 9_999_999, dtype=torch.bfloat16),)
    images = [Packed(f"{number:064x}", (99_999, 99_999, 99_999), parts, (), ()) for number in range(MAX_IMAGES)]
    with ShardWriter(tmp_path, NAME, make_fingerprint("bfloat16"), MAX_IMAGES) as writer:
        writer._end += 10**14
        writer.add(images)
        writer.commit()
    header, start = read_header(shard_path(tmp_path, NAME))
    assert len(header) == 1 + MAX_IMAGES
    assert header[images[0].key]["data_offsets"] == [10**14, 10**14]
    assert start < MAX_HEADER_BYTES


def test_a_shard_without_a_receipt_does_not_exist(tmp_path):
    write_cache(tmp_path)
    receipt_path(tmp_path, NAME).unlink()
    cache = VisionCache.open(tmp_path)
    assert (len(cache), cache.num_shards, cache.size_bytes) == (0, 0, 0)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_writer_that_does_not_commit_leaves_nothing(tmp_path, error):
    with contextlib.suppress(*([error] if error else [])), open_writer(tmp_path) as writer:
        writer.add(pack(random_parts("float32")))
        assert len(files(tmp_path)) == 1
        if error:
            raise error
    assert files(tmp_path) == []


def test_what_a_killed_writer_left_does_not_count_and_goes_with_its_shard_alone(tmp_path):
    write_cache(tmp_path)
    whole = files(tmp_path)
    for name in (NAME, "shard-10000", "shard-100000"):
        shard_path(tmp_path, name).with_suffix(f".safetensors{TEMPORARY_MARK}host-1-abcdef01").touch()
    assert len(VisionCache.open(tmp_path)) == len(GRIDS)
    remove_leftovers(tmp_path, "shard-10000")
    left = [Path(name).name.split(".")[0] for name in files(tmp_path) if TEMPORARY_MARK in name]
    assert left == [NAME, "shard-100000"]
    for name in left:
        remove_leftovers(tmp_path, name)
    assert files(tmp_path) == whole


def test_writing_leaves_no_temporary_file(tmp_path):
    write_cache(tmp_path)
    assert files(tmp_path) == ["manifest.json", f"receipts/{NAME}.json", f"shards/{NAME}.safetensors"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_file_modes_follow_the_umask(tmp_path, umask, mask):
    os.umask(mask)
    write_cache(tmp_path)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in files(tmp_path)} == {0o666 & ~mask}
    assert os.umask(mask) == mask


def test_a_shard_that_is_finished_is_not_made_again(tmp_path):
    write_cache(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    with open_writer(tmp_path) as writer:
        writer.add(pack(random_parts("float32", seed=1)))
        assert not writer.commit()
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


class Turns:
    """Lets two threads go on step by step in an order given: a thread has its turn until it asks for the next."""

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
def test_two_writers_of_one_shard_end_in_one_receipt_that_fits_the_file_that_lies_there(tmp_path, monkeypatch, order):
    """They look for a receipt, put their file in its place and write their receipt, in every order there is."""
    turns = Turns(order)

    def in_turn(function):
        def wait(*arguments):
            turns.step()
            return function(*arguments)

        return wait

    monkeypatch.setattr(shards, "has_receipt", in_turn(has_receipt))
    monkeypatch.setattr(os, "replace", in_turn(os.replace))
    monkeypatch.setattr(shards, "write_receipt", in_turn(shards.write_receipt))
    # The last step goes on to the end: what follows a receipt that is there already must not take a turn of its own.
    monkeypatch.setattr(shards, "write_text", lambda path, text: path.write_text(text))
    write_manifest(tmp_path)
    parts = {name: random_parts("float32", seed) for seed, name in enumerate("AB")}
    won = {}

    def commit(name: str) -> None:
        try:
            won[name] = writers[name].commit()
        finally:
            turns.end()

    with contextlib.ExitStack() as stack:
        writers = {name: stack.enter_context(open_writer(tmp_path)) for name in "AB"}
        for name, writer in writers.items():
            for write in writer.add(pack(parts[name])):
                write.result()
        threads = [threading.Thread(target=commit, args=(name,), name=name) for name in "AB"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert sorted(won.values()) == [False, True]
    assert_whole(tmp_path)
    cache = VisionCache.open(tmp_path)
    found = {key: bits(cache[key]) for key in GRIDS}
    assert found in [{key: bits(*tensors) for key, tensors in parts[name].items()} for name in "AB"]
    assert len(files(tmp_path)) == 3


def fail_to_write(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_that_fails_surfaces_when_more_is_added_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", fail_to_write)
    packed = pack(random_parts("float32"))
    with pytest.raises(OSError, match="No space left"), open_writer(tmp_path) as writer:
        for write in writer.add(packed[:1]):
            write.exception()
        writer.add(packed[1:])
    assert files(tmp_path) == []


def test_a_write_that_fails_surfaces_at_the_latest_in_commit_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", fail_to_write)
    with pytest.raises(OSError, match="No space left"), open_writer(tmp_path) as writer:
        writer.add(pack(random_parts("float32")))
        writer.commit()
    assert files(tmp_path) == []


def test_a_write_that_fails_while_others_are_added_is_not_forgotten(tmp_path):
    class Failing(Future):
        """Fails just after it was first asked whether it is done."""

        def done(self) -> bool:
            was_done = super().done()
            if not was_done:
                self.set_exception(OSError(errno.ENOSPC, "No space left on device"))
            return was_done

    with open_writer(tmp_path) as writer:
        writer._waiting = [Failing()]
        with pytest.raises(OSError, match="No space left"):
            writer.add(pack(random_parts("float32")))
            writer.commit()


def test_a_header_that_can_not_be_written_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="No space left"), open_writer(tmp_path) as writer:
        for write in writer.add(pack(random_parts("float32"))):
            write.result()
        monkeypatch.setattr(os, "pwrite", fail_to_write)
        writer.commit()
    assert files(tmp_path) == []


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_all_is_written_however_little_the_system_takes_at_once(tmp_path, monkeypatch, most):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: pwrite(file, content[:most], offset))
    content = os.urandom(100)
    with (tmp_path / "file").open("wb") as file:
        write_all(file.fileno(), memoryview(content), 5)
        write_all(file.fileno(), memoryview(b""), 50)
    assert (tmp_path / "file").read_bytes() == bytes(5) + content
