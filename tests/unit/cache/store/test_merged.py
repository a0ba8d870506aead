"""Kept tokens are stored beside the features of their image, and covered by its checksum."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.small_caches import OneShard, write_manifest

from lookonce.cache.constants import DtypeName
from lookonce.cache.maintenance.checks import check_shard, ignore
from lookonce.cache.maintenance.rebuild import rebuild_plan, rebuild_receipt
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.manifest import read_manifest, read_plan
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.receipts import read_receipt
from lookonce.cache.store.shards import ShardWriter, StoredImage, shard_path
from lookonce.errors import CacheCorrupt

KEPT = {key: [*range(h * w // 4)][::-2][::-1] for key, (_, h, w) in OneShard.grids.items()}
"""Every other token, the last one included: 2, 1 and 8 tokens."""
KEY = OneShard.keys[0]
NAME = OneShard.name


@pytest.fixture(params=["float32", "bfloat16", "fp8_e4m3"])
def fingerprint(request, one_shard) -> Fingerprint:
    dtype: DtypeName = request.param
    return replace(one_shard.fingerprint(dtype), image_processor={"merge_size": 2}, keep=0.5)


@pytest.fixture
def folder(tmp_path, fingerprint):
    """A cache whose images keep half of their tokens."""
    return write_cache(tmp_path, fingerprint, KEPT)


def write_cache(folder: Path, fingerprint: Fingerprint, kept_of: dict[str, list[int]]) -> Path:
    write_manifest(folder, fingerprint)
    with ShardWriter(folder, NAME, fingerprint, len(kept_of)) as writer:
        writer.add(
            [
                StoredImage(key, OneShard.grids[key], tensors(fingerprint, key, kept), (), ())
                for key, kept in kept_of.items()
            ]
        )
        assert writer.commit()
    return folder


def tensors(fingerprint: Fingerprint, key: str, kept: list[int]) -> tuple[torch.Tensor, ...]:
    features = torch.randn(len(kept), 4, 8, generator=torch.Generator().manual_seed(int(key[:4], 16)))
    stored = fingerprint.storage.quantize(features.to(fingerprint.storage.compute))
    return (*stored, torch.tensor(kept, dtype=torch.int32))


def test_features_and_kept_tokens_are_read(folder, one_shard, fingerprint):
    cache = pickle.loads(pickle.dumps(VisionCache.open(folder)))
    assert cache.fingerprint == read_manifest(folder) == fingerprint
    for key in one_shard.keys:
        stored, *scale, _ = tensors(fingerprint, key, KEPT[key])
        assert torch.equal(cache[key], fingerprint.storage.dequantize(stored, *scale or [None]))
        kept = cache.kept(key)
        assert (kept.indices.tolist(), kept.grid_thw, kept.merge_size) == (KEPT[key], one_shard.grids[key], 2)
        assert cache.entry(key)[1].size_bytes == len(KEPT[key]) * fingerprint.bytes_per_token


def test_kept_tokens_are_read_without_the_features(folder, monkeypatch):
    cache, real, sizes = VisionCache.open(folder), os.preadv, []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    for key in OneShard.keys:
        cache.kept(key)
    assert sizes == [4 * len(KEPT[key]) for key in OneShard.keys]


def test_a_shard_stays_a_safetensors_file_and_describes_itself(folder, one_shard, fingerprint):
    loaded = load_file(shard_path(folder, NAME))
    for key in one_shard.keys:
        assert loaded[f"{key}.kept"].tolist() == KEPT[key]
    receipt = read_receipt(folder, NAME)
    assert check_shard(folder, receipt, fingerprint, every_byte=True, on_block=ignore) == []
    again = rebuild_receipt(folder, NAME, fingerprint)
    assert again.images == receipt.images


def test_a_flipped_bit_of_a_kept_token_is_an_error_before_its_features_are_used(folder, fingerprint):
    """Here 1 becomes 0, which could be a kept token."""
    entry = read_receipt(folder, NAME).images[KEY]
    path = shard_path(folder, NAME)
    content = bytearray(path.read_bytes())
    content[entry.offset + entry.size_bytes - 4 * entry.num_tokens] ^= 1
    path.write_bytes(content)
    with pytest.raises(CacheCorrupt, match="do not have the checksum"):
        VisionCache.open(folder)[KEY]
    [problem] = check_shard(folder, read_receipt(folder, NAME), fingerprint, every_byte=True, on_block=ignore)
    assert problem.image == KEY


@pytest.mark.parametrize(
    "kept",
    [[-1, 2], [0, 4], [3, 1], [1, 1], [0, 2**31 - 1], [3, -(2**31)], [0], [0, 1, 2]],
    ids=["negative", "beyond", "descending", "twice", "far beyond", "overflow", "too few", "too many"],
)
@pytest.mark.parametrize("fingerprint", ["bfloat16"], indirect=True)
def test_kept_tokens_that_the_patch_grid_does_not_have_are_an_error(tmp_path, fingerprint, kept):
    """All checksums are right, as those of a hostile cache are."""
    folder = write_cache(tmp_path, fingerprint, KEPT | {KEY: kept})
    cache = VisionCache.open(folder)
    with pytest.raises(CacheCorrupt, match=f"image {KEY} .* have kept tokens that do not fit its patch grid; run: "):
        cache.kept(KEY)
    for key in OneShard.keys[1:]:
        assert cache.kept(key).indices.tolist() == KEPT[key]
    [problem] = check_shard(folder, read_receipt(folder, NAME), fingerprint, every_byte=True, on_block=ignore)
    assert (problem.image, problem.part) == (KEY, "image") and "do not fit its patch grid" in problem.what


@pytest.mark.parametrize("num_tokens", [0, 10**12])
def test_a_receipt_with_another_number_of_tokens_is_a_problem(folder, fingerprint, num_tokens):
    receipt = read_receipt(folder, NAME)
    images = receipt.images | {KEY: replace(receipt.images[KEY], num_tokens=num_tokens)}
    found = check_shard(folder, replace(receipt, images=images), fingerprint, every_byte=True, on_block=ignore)
    assert any("do not fit its patch grid" in problem.what for problem in found)


@pytest.mark.parametrize("keep", [0, -0.5, 1.5, "half", None, float("nan")])
@pytest.mark.parametrize("fingerprint", ["bfloat16"], indirect=True)
def test_a_manifest_with_another_share_than_there_can_be_is_broken(folder, keep):
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["fingerprint"]["keep"] = keep
    del manifest["sha256"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CacheCorrupt, match="is broken"):
        read_manifest(folder)


def test_a_cache_in_which_all_are_kept_has_none_of_it(one_shard, tmp_path):
    one_shard.write_cache(tmp_path)
    assert VisionCache.open(tmp_path).kept(one_shard.keys[0]) is None
    assert not any("kept" in name for name in load_file(shard_path(tmp_path, NAME)))


def test_a_plan_that_is_made_again_has_the_numbers_before_merging(folder, one_shard, fingerprint):
    rebuild_plan(folder, {}, fingerprint)
    planned = {image.key: image.num_tokens for image in read_plan(folder).images()}
    assert planned == {key: h * w // 4 for key, (_, h, w) in one_shard.grids.items()}
