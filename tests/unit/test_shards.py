"""Shards and receipts on disk: what was written is there bit for bit, and only a receipt makes it count."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from lookonce.cache.fingerprint import DTYPES, Fingerprint, raw_bytes
from lookonce.cache.read import VisionCache
from lookonce.cache.shards import Grid, read_header, read_receipts, receipt_path, shard_path, write_shard
from lookonce.files import TEMPORARY_MARK, atomic_write, hash_file, write_json

LEVELS, HIDDEN = 4, 8
GRIDS: dict[str, Grid] = {
    sha256(name.encode()).hexdigest(): grid for name, grid in {"a": (1, 4, 4), "b": (1, 2, 2), "c": (1, 6, 10)}.items()
}


def make_fingerprint(dtype: str) -> Fingerprint:
    return Fingerprint(1, "0" * 64, {"out_hidden_size": HIDDEN}, {}, LEVELS, dtype)


def random_features(dtype: str) -> dict[str, torch.Tensor]:
    """Every bit pattern may occur: NaNs, infinities, negative zero."""
    generator = torch.Generator().manual_seed(0)
    features = {}
    for key, (t, h, w) in GRIDS.items():
        shape = (t * h * w // 4, LEVELS, HIDDEN * DTYPES[dtype].itemsize)
        features[key] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(DTYPES[dtype])
    return features


def write_cache(folder: Path, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """A cache of one shard; gives what was written."""
    fingerprint, features = make_fingerprint(dtype), random_features(dtype)
    write_json(folder / "manifest.json", {"format_version": 1, "fingerprint": fingerprint.to_json()})
    write_shard(folder, "shard-00000", features, GRIDS, fingerprint, 1.5)
    return features


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(raw_bytes(tensor))


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_features_come_back_bit_for_bit(tmp_path, dtype):
    written = write_cache(tmp_path, dtype)
    cache = VisionCache.open(tmp_path)
    assert cache.entries.keys() == written.keys()
    for key, tensor in written.items():
        assert (cache[key].dtype, cache[key].shape) == (tensor.dtype, tensor.shape)
        assert bits(cache[key]) == bits(tensor)
        assert cache.grid_thw(key) == GRIDS[key]


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_safetensors_reads_the_same_tensors(tmp_path, dtype):
    written = write_cache(tmp_path, dtype)
    with safe_open(shard_path(tmp_path, "shard-00000"), framework="pt") as file:
        assert set(file.keys()) == written.keys()
        for key, tensor in written.items():
            found = file.get_tensor(key)
            assert (found.dtype, bits(found)) == (tensor.dtype, bits(tensor))


def test_a_shard_describes_itself(tmp_path):
    write_cache(tmp_path)
    with safe_open(shard_path(tmp_path, "shard-00000"), framework="pt") as file:
        metadata = file.metadata()
    assert {key: tuple(grid) for key, grid in json.loads(metadata.pop("grid_thw")).items()} == GRIDS
    assert metadata == {
        "format": "lookonce-features",
        "format_version": "1",
        "fingerprint": make_fingerprint("float32").sha256,
    }


def test_noncontiguous_features_are_written_as_they_read(tmp_path):
    fingerprint = make_fingerprint("float32")
    [key, *_] = GRIDS
    features = torch.randn(HIDDEN, LEVELS, 4).permute(2, 1, 0)
    write_json(tmp_path / "manifest.json", {"format_version": 1, "fingerprint": fingerprint.to_json()})
    write_shard(tmp_path, "shard-00000", {key: features}, GRIDS, fingerprint, 0)
    assert torch.equal(VisionCache.open(tmp_path)[key], features)


def test_a_shard_without_a_receipt_does_not_exist(tmp_path):
    write_cache(tmp_path)
    receipt_path(tmp_path, "shard-00000").unlink()
    cache = VisionCache.open(tmp_path)
    assert (len(cache), cache.num_shards, cache.size_bytes) == (0, 0, 0)


def test_receipts_hold_true_offsets_sizes_and_checksums(tmp_path):
    written = write_cache(tmp_path)
    path = shard_path(tmp_path, "shard-00000")
    content = path.read_bytes()
    [receipt] = read_receipts(tmp_path)
    assert (receipt.shard, receipt.size_bytes, receipt.seconds) == ("shard-00000", len(content), 1.5)
    for key, entry in receipt.entries.items():
        found = content[entry.offset : entry.offset + entry.size_bytes]
        assert found == bits(written[key])
        assert entry.xxh3_64 == xxhash.xxh3_64_hexdigest(found)
        assert entry.num_tokens == written[key].shape[0]


def test_a_receipt_names_its_cache_and_the_checksum_of_its_file(tmp_path):
    write_cache(tmp_path)
    receipt = json.loads(receipt_path(tmp_path, "shard-00000").read_text())
    content = shard_path(tmp_path, "shard-00000").read_bytes()
    assert receipt["xxh3_128"] == xxhash.xxh3_128_hexdigest(content) == hash_file(shard_path(tmp_path, "shard-00000"))
    assert receipt["fingerprint"] == make_fingerprint("float32").sha256
    assert receipt["format_version"] == 1


def test_the_header_says_where_the_data_starts(tmp_path):
    write_cache(tmp_path)
    header, data_start = read_header(shard_path(tmp_path, "shard-00000"))
    num_data = max(tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__")
    assert data_start + num_data == shard_path(tmp_path, "shard-00000").stat().st_size


def test_a_shard_of_no_images_counts(tmp_path):
    write_shard(tmp_path, "shard-00000", {}, {}, make_fingerprint("float32"), 0)
    [receipt] = read_receipts(tmp_path)
    assert receipt.entries == {}


def test_receipts_are_read_in_the_order_of_their_shards(tmp_path):
    names = ["shard-00010", "shard-00002", "shard-00001"]
    for name in names:
        write_shard(tmp_path, name, {}, {}, make_fingerprint("float32"), 0)
    assert [receipt.shard for receipt in read_receipts(tmp_path)] == sorted(names)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_file_modes_follow_the_umask(tmp_path, umask, mask):
    os.umask(mask)
    write_cache(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~mask}
    assert os.umask(mask) == mask


def test_writing_leaves_no_temporary_file(tmp_path):
    write_cache(tmp_path)
    assert not list(tmp_path.rglob(f"*{TEMPORARY_MARK}*"))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic_write(path) as temporary:
        temporary.write_text("ne")
        raise OSError("disk full")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "old")]
