"""Shards: features bit for bit, in a format that any safetensors reader opens; only a receipt makes them count."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable
from hashlib import sha256

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lookonce.cache.format import STORAGE, read_header
from lookonce.cache.store import shards
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import MAX_IMAGES, Failure, has_receipt
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import (
    ALIGNMENT,
    MAX_UNWRITTEN,
    DirectFile,
    ShardWriter,
    StoredImage,
    shard_path,
    write_all,
)

MAX_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors library reads."""


@pytest.mark.guarantee("Shards are plain safetensors files.")
@pytest.mark.parametrize("dtype", STORAGE)
def test_features_are_read_bit_for_bit_also_by_the_safetensors_library(one_shard, tmp_path, dtype):
    written = one_shard.write_cache(tmp_path, dtype)
    cache = VisionCache.open(tmp_path)
    assert set(cache.keys()) == written.keys()
    for key, (stored, *scale) in written.items():
        expected = STORAGE[dtype].dequantize(stored, *scale or [None])
        assert (cache[key].dtype, cache[key].shape) == (STORAGE[dtype].compute, stored.shape)
        assert one_shard.bits(cache[key]) == one_shard.bits(expected)
        assert cache.grid_thw(key) == one_shard.grids[key]
    tensors = one_shard.named(written)
    loaded = load_file(shard_path(tmp_path, one_shard.name))
    with safe_open(shard_path(tmp_path, one_shard.name), framework="pt") as file:
        assert set(file.keys()) == loaded.keys() == tensors.keys()
        for name, tensor in tensors.items():
            for found in (file.get_tensor(name), loaded[name]):
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert one_shard.bits(found) == one_shard.bits(tensor)


@pytest.mark.parametrize(
    ("dtype", "golden"),
    [
        ("bfloat16", "c7501738faaa39a3dd5ce6f60250f77d4b3ee48c45d98501baec193d78d9122e"),
        ("float32", "44797cfab9f9548daee61bdb961368250effa1dfdbd3ccdff2a942ca09164efb"),
        ("fp8_e4m3", "c960529cabed308a1f3516a73e4a18a1133285950fed0244e8e73a1fc64ac137"),
    ],
)
def test_the_bytes_of_a_shard_do_not_drift(one_shard, tmp_path, dtype, golden):
    storage = STORAGE[dtype]
    with one_shard.open_writer(tmp_path, dtype) as writer:
        for key, (t, h, w) in reversed(one_shard.grids.items()):
            shape = -1, one_shard.levels, one_shard.hidden
            values = torch.arange(t * h * w // 4 * shape[1] * shape[2]).view(shape) % 97 - 48
            writer.add([StoredImage(key, (t, h, w), storage.quantize(values.to(storage.compute)), (), ())])
        writer.commit()
    assert sha256(shard_path(tmp_path, one_shard.name).read_bytes()).hexdigest() == golden


def test_a_receipt_has_the_failed_images_and_their_reasons(one_shard, tmp_path):
    failures = {
        one_shard.keys[2]: Failure("c.jpg", "cut short", retry=True),
        one_shard.keys[1]: Failure("b.jpg", "no image"),
    }
    with one_shard.open_writer(tmp_path) as writer:
        writer.add(one_shard.stored(one_shard.random_tensors("float32"))[:1])
        writer.failed |= failures
        writer.commit()
    receipt = one_shard.assert_whole(tmp_path)
    assert list(receipt.images) == one_shard.keys[:1]
    assert receipt.failed == failures and list(receipt.failed) == sorted(failures)


def test_noncontiguous_features_are_written_in_order(one_shard, tmp_path):
    one_shard.write_manifest(tmp_path)
    features = torch.randn(one_shard.hidden, one_shard.levels, 4).permute(2, 1, 0)
    with one_shard.open_writer(tmp_path) as writer:
        writer.add(one_shard.stored({one_shard.keys[0]: (features,)}))
        writer.commit()
    assert torch.equal(VisionCache.open(tmp_path)[one_shard.keys[0]], features)


def test_the_header_has_space_for_images_with_the_longest_numbers(one_shard, tmp_path):
    """The worst case has a grid for each tensor: with scales two tensors share one."""
    num_images, tensors = 1000, (torch.empty(0, 99, 9_999_999, dtype=torch.bfloat16),)
    fingerprint = Fingerprint(2, "0" * 64, {"out_hidden_size": 9_999_999}, {}, 99, "bfloat16")
    images = [StoredImage(f"{number:064x}", (99_999, 99_999, 99_999), tensors, (), ()) for number in range(num_images)]
    with ShardWriter(tmp_path, one_shard.name, fingerprint, num_images) as writer:
        writer._end += 10**14
        writer.add(images)
        writer.commit()
    header, start = read_header(shard_path(tmp_path, one_shard.name))
    assert len(header) == 1 + num_images
    assert header[images[0].key]["data_offsets"] == [10**14, 10**14]
    assert start / num_images * MAX_IMAGES < MAX_HEADER_BYTES


FP8 = STORAGE["fp8_e4m3"]
LARGEST = 448.0
TOKENS, LEVELS, HIDDEN = 40, 4, 256


def normal(*, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.randn(TOKENS, LEVELS, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()


def through(features: torch.Tensor) -> torch.Tensor:
    return FP8.dequantize(*FP8.quantize(features))


def errors(features: torch.Tensor) -> torch.Tensor:
    """For each token and level the length of the error, relative to that of the vector."""
    exact = features.double()
    return (through(features).double() - exact).norm(dim=-1) / exact.norm(dim=-1)


def test_eight_bits_have_a_scale_for_each_token_and_level():
    stored, scale = FP8.quantize(normal())
    assert (stored.dtype, stored.shape) == (torch.float8_e4m3fn, (TOKENS, LEVELS, HIDDEN))
    assert (scale.dtype, scale.shape) == (torch.float32, (TOKENS, LEVELS))
    assert torch.equal(scale, normal().float().abs().amax(-1) / LARGEST)
    back = FP8.dequantize(stored, scale)
    assert (back.dtype, back.shape) == (torch.bfloat16, (TOKENS, LEVELS, HIDDEN))


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_the_error_is_a_few_percent_of_a_vector_whatever_its_length(magnitude):
    relative = errors(normal(hidden=2048) * magnitude)
    assert 0.01 < relative.min() and relative.max() < 0.04
    assert relative.mean() == pytest.approx(0.026, abs=0.002)


def test_an_outlier_does_not_change_other_tokens_and_levels():
    features = normal()
    before = through(features)
    features[7, 2] *= 1e4
    after = through(features)
    mask = torch.ones(TOKENS, LEVELS, dtype=torch.bool)
    mask[7, 2] = False
    assert torch.equal(after[mask], before[mask])
    assert errors(features).max() < 0.04


def test_zero_tokens_stay_zero():
    features = normal()
    features[3] = 0
    features[5, 1] = -0.0
    stored, scale = FP8.quantize(features)
    assert (scale[3] == 1).all() and scale[5, 1] == 1
    back = FP8.dequantize(stored, scale)
    assert (back[3] == 0).all() and (back[5, 1] == 0).all()
    assert (back[4] != 0).any()


def test_every_finite_bfloat16_stays_finite_and_near():
    """Each is the largest value of a token, beside a thousandth of it."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    largest = every[every.isfinite()]
    features = torch.stack([largest, (largest.double() / 1000).bfloat16()], dim=-1).unsqueeze(1)
    back = through(features)
    assert back.isfinite().all()
    assert FP8.quantize(features)[0].float().isfinite().all()
    difference = (back.double() - features.double()).abs().amax(-1)
    assert (difference <= largest.double().abs().unsqueeze(-1) * 2**-8).all()


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_writer_that_does_not_commit_leaves_nothing(one_shard, tmp_path, error):
    with contextlib.suppress(*([error] if error else [])), one_shard.open_writer(tmp_path) as writer:
        writer.add(one_shard.stored(one_shard.random_tensors("float32")))
        assert len(one_shard.files(tmp_path)) == 1
        if error:
            raise error
    assert one_shard.files(tmp_path) == []


class Turns:
    """Lets two threads run step by step in a given order: a thread runs until it asks for its next turn."""

    def __init__(self) -> None:
        self.go, self.paused = {name: threading.Semaphore(0) for name in "AB"}, threading.Semaphore(0)
        self.running = set("AB")

    def step(self) -> None:
        if go := self.go.get(threading.current_thread().name):
            self.paused.release()
            assert go.acquire(timeout=30)

    def run(self, order: str, work: Callable[[str], object]) -> None:
        """Call `work` with each name in a thread of its own; it takes its next step when `order` names it."""

        def run_one(name: str) -> None:
            try:
                work(name)
            finally:
                self.running.discard(name)
                self.paused.release()

        for name in "AB":
            threading.Thread(target=run_one, args=(name,), name=name).start()
            assert self.paused.acquire(timeout=30)
        for name in order:
            if name in self.running:
                self.go[name].release()
                assert self.paused.acquire(timeout=30)


ORDERS = sorted({"".join(order) for order in itertools.permutations("AAABBB")})


@pytest.mark.parametrize("order", ORDERS)
def test_two_writers_of_one_shard_leave_one_receipt_that_matches_the_file(one_shard, tmp_path, monkeypatch, order):
    """Each checks for a receipt, renames its file and writes its receipt; all orders of these steps are tried."""
    turns = Turns()

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

    with contextlib.ExitStack() as stack:
        writers = {name: stack.enter_context(one_shard.open_writer(tmp_path)) for name in "AB"}
        for name, writer in writers.items():
            writer.add(one_shard.stored(tensors[name]))
            writer.wait()
        turns.run(order, lambda name: won.update({name: writers[name].commit()}))
    assert sorted(won.values()) == [False, True]
    one_shard.assert_whole(tmp_path)
    cache = VisionCache.open(tmp_path)
    found = {key: one_shard.bits(cache[key]) for key in one_shard.grids}
    assert found in [{key: one_shard.bits(*tensors) for key, tensors in tensors[name].items()} for name in "AB"]
    assert len(one_shard.files(tmp_path)) == 3


def fail_to_write(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["add soon after", "commit at the latest", "commit if it is of the header"])
def test_a_failed_write_is_raised_by_the_next_step_and_leaves_nothing(one_shard, tmp_path, monkeypatch, step):
    images = one_shard.stored(one_shard.random_tensors("float32"))
    with pytest.raises(OSError, match="No space left"), one_shard.open_writer(tmp_path) as writer:
        if "header" in step:
            writer.add(images)
            writer.wait()
        monkeypatch.setattr(os, "pwrite", fail_to_write)
        for _ in range(MAX_UNWRITTEN + 1 if "add" in step else "latest" in step):
            writer.add(images)
        assert "add" not in step
        writer.commit()
    assert one_shard.files(tmp_path) == []


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


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_all_bytes_are_written_even_if_each_call_writes_few(tmp_path, monkeypatch, most):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: pwrite(file, content[:most], offset))
    content = os.urandom(100)
    with (tmp_path / "file").open("wb") as file:
        write_all(file.fileno(), memoryview(content), 5)
        write_all(file.fileno(), memoryview(b""), 50)
    assert (tmp_path / "file").read_bytes() == bytes(5) + content
