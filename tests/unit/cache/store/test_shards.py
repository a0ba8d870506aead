"""Shard files: features bit for bit, in a format that any safetensors reader opens; only a receipt makes them count."""

from __future__ import annotations

import json
import math
from hashlib import sha256

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from lookonce.cache.format import STORAGE, DtypeName, read_header, scales
from lookonce.cache.store.metadata import MAX_IMAGES, Failure, read_receipt, receipt_path
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import ALIGNMENT, ShardWriter, StoredImage, shard_path

MAX_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors library reads."""


@pytest.mark.parametrize("dtype", STORAGE)
def test_features_are_read_bit_for_bit(one_shard, tmp_path, dtype):
    written = one_shard.write_cache(tmp_path, dtype)
    cache = VisionCache.open(tmp_path)
    assert set(cache.keys()) == written.keys()
    for key, (stored, *scale) in written.items():
        expected = STORAGE[dtype].dequantize(stored, *scale or [None])
        assert (cache[key].dtype, cache[key].shape) == (STORAGE[dtype].compute, stored.shape)
        assert one_shard.bits(cache[key]) == one_shard.bits(expected)
        assert cache.grid_thw(key) == one_shard.grids[key]


@pytest.mark.guarantee("Shards are plain safetensors files.")
@pytest.mark.parametrize("dtype", STORAGE)
def test_the_safetensors_library_reads_the_same_tensors(one_shard, tmp_path, dtype):
    expected = one_shard.named(one_shard.write_cache(tmp_path, dtype))
    loaded = load_file(shard_path(tmp_path, one_shard.name))
    with safe_open(shard_path(tmp_path, one_shard.name), framework="pt") as file:
        assert set(file.keys()) == loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            for found in (file.get_tensor(name), loaded[name]):
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                assert one_shard.bits(found) == one_shard.bits(tensor)


@pytest.mark.parametrize("dtype", STORAGE)
def test_a_shard_describes_itself(one_shard, tmp_path, dtype):
    one_shard.write_cache(tmp_path, dtype)
    with safe_open(shard_path(tmp_path, one_shard.name), framework="pt") as file:
        metadata = file.metadata()
    assert {key: tuple(grid) for key, grid in json.loads(metadata.pop("grid_thw")).items()} == one_shard.grids
    assert metadata == {
        "format": "lookonce-features",
        "format_version": "2",
        "fingerprint": one_shard.fingerprint(dtype).sha256,
    }


@pytest.mark.parametrize("dtype", STORAGE)
def test_images_are_contiguous_from_a_page_boundary_to_the_end_of_the_file(one_shard, tmp_path, dtype):
    written = one_shard.write_cache(tmp_path, dtype)
    content, receipt = shard_path(tmp_path, one_shard.name).read_bytes(), one_shard.assert_whole(tmp_path)
    header, start = read_header(shard_path(tmp_path, one_shard.name))
    assert start == receipt.header_bytes and start % ALIGNMENT == 0
    offset = start
    for key, tensors in written.items():
        entry = receipt.images[key]
        assert (entry.offset, entry.size_bytes) == (offset, len(one_shard.bits(*tensors)))
        assert content[offset : offset + entry.size_bytes] == one_shard.bits(*tensors)
        for name, part in one_shard.named({key: tensors}).items():
            assert header[name]["data_offsets"] == [offset - start, offset - start + part.nbytes]
            offset += part.nbytes
    assert offset == len(content) == receipt.size_bytes


@pytest.mark.parametrize("dtype", STORAGE)
def test_an_image_has_the_planned_number_of_bytes(one_shard, tmp_path, dtype):
    one_shard.write_cache(tmp_path, dtype)
    for entry in read_receipt(tmp_path, one_shard.name).images.values():
        assert entry.size_bytes == entry.num_tokens * one_shard.fingerprint(dtype).bytes_per_token


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
            values = (
                torch.arange(t * h * w // 4 * one_shard.levels * one_shard.hidden).view(
                    -1, one_shard.levels, one_shard.hidden
                )
                % 97
                - 48
            )
            writer.add([StoredImage(key, (t, h, w), storage.quantize(values.to(storage.compute)), (), ())])
        writer.commit()
    assert sha256(shard_path(tmp_path, one_shard.name).read_bytes()).hexdigest() == golden


def test_a_receipt_describes_what_was_written(one_shard, tmp_path):
    written = one_shard.write_cache(tmp_path)
    receipt = one_shard.assert_whole(tmp_path)
    assert (receipt.shard, receipt.fingerprint) == (one_shard.name, one_shard.fingerprint("float32").sha256)
    assert 0 <= receipt.seconds < 60
    assert list(receipt.images) == sorted(one_shard.grids)
    for key, entry in receipt.images.items():
        assert (entry.num_tokens, entry.grid_thw) == (len(written[key][0]), one_shard.grids[key])
        assert (entry.norms, entry.peaks) == ((1.0,) * one_shard.levels, (2.0,) * one_shard.levels)


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


def test_a_shard_without_images_counts_and_is_a_safetensors_file(one_shard, tmp_path):
    with one_shard.open_writer(tmp_path) as writer:
        assert writer.commit()
    assert one_shard.assert_whole(tmp_path).images == {}
    assert load_file(shard_path(tmp_path, one_shard.name)) == {}


def test_the_header_has_space_for_images_with_the_longest_numbers(one_shard, tmp_path):
    """The worst case has a grid for each tensor: with scales two tensors share one."""
    num_images, tensors = 1000, (torch.empty(0, 99, 9_999_999, dtype=torch.bfloat16),)
    images = [StoredImage(f"{number:064x}", (99_999, 99_999, 99_999), tensors, (), ()) for number in range(num_images)]
    with ShardWriter(tmp_path, one_shard.name, one_shard.fingerprint("bfloat16"), num_images) as writer:
        writer._end += 10**14
        writer.add(images)
        writer.commit()
    header, start = read_header(shard_path(tmp_path, one_shard.name))
    assert len(header) == 1 + num_images
    assert header[images[0].key]["data_offsets"] == [10**14, 10**14]
    assert start / num_images * MAX_IMAGES < MAX_HEADER_BYTES


def test_a_shard_without_a_receipt_does_not_exist(one_shard, tmp_path):
    one_shard.write_cache(tmp_path)
    receipt_path(tmp_path, one_shard.name).unlink()
    cache = VisionCache.open(tmp_path)
    assert (len(cache), cache.num_shards, cache.size_bytes) == (0, 0, 0)


# Storage dtypes: 8 bits stay within an error bound that outliers do not break.

FP8 = STORAGE["fp8_e4m3"]
LARGEST = 448.0
TOKENS, LEVELS, HIDDEN = 40, 4, 256


def normal(tokens: int = TOKENS, *, hidden: int = HIDDEN, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, LEVELS, hidden, generator=generator).bfloat16()


def through(features: torch.Tensor) -> torch.Tensor:
    return FP8.dequantize(*FP8.quantize(features))


def errors(features: torch.Tensor) -> torch.Tensor:
    """For each token and level the length of the error, relative to that of the vector."""
    exact = features.double()
    return (through(features).double() - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unscaled_features_are_stored_bit_for_bit(dtype: DtypeName) -> None:
    storage = STORAGE[dtype]
    features = torch.randn(5, LEVELS, HIDDEN).to(storage.compute)
    features[0, 0, :3] = torch.tensor([math.nan, math.inf, -0.0])
    [stored] = storage.quantize(features)
    assert stored.dtype == storage.stored == storage.compute
    assert torch.equal(storage.dequantize(stored, None).view(torch.uint8), features.view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "levels", "hidden", "expected"),
    [
        ("bfloat16", 4, 2048, 4 * 2048 * 2),
        ("float32", 4, 2048, 4 * 2048 * 4),
        ("fp8_e4m3", 4, 2048, 4 * (2048 + 4)),
        ("fp8_e4m3", 1, 4096, 4096 + 4),
    ],
)
def test_bytes_per_token_are_those_of_the_stored_tensors(dtype, levels, hidden, expected):
    storage = STORAGE[dtype]
    assert storage.bytes_per_token(levels, hidden) == expected
    stored = storage.quantize(torch.ones(3, levels, hidden, dtype=storage.compute))
    assert sum(tensor.nbytes for tensor in stored) == 3 * expected


def test_eight_bits_have_a_scale_for_each_token_and_level():
    stored, scale = FP8.quantize(normal())
    assert (stored.dtype, stored.shape) == (torch.float8_e4m3fn, (TOKENS, LEVELS, HIDDEN))
    assert (scale.dtype, scale.shape) == (torch.float32, (TOKENS, LEVELS))
    assert torch.equal(scale, normal().float().abs().amax(-1) / LARGEST)
    back = FP8.dequantize(stored, scale)
    assert (back.dtype, back.shape) == (torch.bfloat16, (TOKENS, LEVELS, HIDDEN))


def test_the_largest_value_of_each_vector_is_stored_exactly():
    features = normal()
    stored, scale = FP8.quantize(features)
    assert torch.equal(stored.float().abs().amax(-1), torch.full((TOKENS, LEVELS), LARGEST))
    largest = features.abs().argmax(-1, keepdim=True)
    assert torch.equal(FP8.dequantize(stored, scale).gather(-1, largest), features.gather(-1, largest))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e6, 1e30])
def test_the_error_is_a_few_percent_of_a_vector_whatever_its_length(magnitude, seed):
    relative = errors(normal(hidden=2048, seed=seed) * magnitude)
    assert 0.01 < relative.min() and relative.max() < 0.04
    assert relative.mean() == pytest.approx(0.026, abs=0.002)


def test_a_token_does_not_change_with_its_neighbours():
    features = normal()
    alone = torch.cat([through(token.unsqueeze(0)) for token in features])
    assert torch.equal(through(features), alone)


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


def test_no_tokens_take_no_bytes():
    stored, scale = FP8.quantize(normal(0))
    assert (stored.nbytes, scale.nbytes) == (0, 0)
    assert FP8.dequantize(stored, scale).shape == (0, LEVELS, HIDDEN)


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


def test_the_scale_of_zeros_is_one():
    assert torch.equal(scales(torch.tensor([[[0.0, -0.0], [2.0, -4.48]]])), torch.tensor([[1.0, 4.48 / LARGEST]]))
