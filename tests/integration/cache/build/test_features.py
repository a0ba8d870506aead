"""Features of the tiny model are those of the stock model, whatever shares a shard or a tower batch with an image."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from PIL import Image
from support.small_caches import features_in
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import ImageIndex

pytestmark = pytest.mark.usefixtures("no_fsync")

DTYPES = ["float32", "bfloat16", "fp8_e4m3"]


@functools.cache
def load(model: Path, dtype: str) -> tuple[Fingerprint, ImageProcessor, Tower]:
    model_folder, processor = ModelFolder.open(str(model)), ImageProcessor(model)
    fingerprint = Fingerprint.of(model_folder, processor, dtype)
    return fingerprint, processor, Tower(model_folder, fingerprint.storage.compute)


def real_build(sample: Path, root: Path, images: ImageIndex, dtype: str, shard_bytes: int = 10**6) -> VisionCache:
    fingerprint, processor, tower = load(sample / "model", dtype)
    options = BuildOptions(shard_bytes)
    return VisionCache.open(build_cache(root, fingerprint, processor, images, lambda: tower, options).folder)


@pytest.mark.parametrize("dtype", DTYPES)
def test_features_do_not_depend_on_neighbours_or_on_the_order(site, sample, tmp_path, dtype):
    paths = sorted((sample / "images").glob("frame-*.jpg"))[::20]
    together = features_in(real_build(sample, tmp_path / "together", site.index(*paths), dtype))
    backwards = ImageIndex({}, dict(reversed(site.index(*paths).path_of.items())), site.index(*paths).size_of)
    assert features_in(real_build(sample, tmp_path / "backwards", backwards, dtype, shard_bytes=1)) == together
    for path in paths:
        [(key, alone)] = features_in(real_build(sample, tmp_path / path.stem, site.index(path), dtype)).items()
        assert alone == together[key]


def test_features_are_those_of_the_stock_model(site, sample, tmp_path):
    images = site.index(*sorted((sample / "images").glob("frame-*.jpg"))[::20])
    cache = real_build(sample, tmp_path, images, "float32")
    model = Qwen3VLForConditionalGeneration.from_pretrained(sample / "model", dtype=torch.float32)
    processor = Qwen2VLImageProcessorPil.from_pretrained(sample / "model")
    for key, path in images.path_of.items():
        inputs = processor(images=[Image.open(path)], return_tensors="pt")
        with torch.no_grad():
            output = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], return_dict=True)
        assert list(cache.grid_thw(key)) == inputs["image_grid_thw"][0].tolist()
        expected = [output.pooler_output, *output.deepstack_features]
        assert len(expected) == cache[key].shape[1] == 4
        for level, tensor in enumerate(expected):
            torch.testing.assert_close(cache[key][:, level], tensor, rtol=0, atol=1e-6)


def test_a_bfloat16_cache_has_the_features_of_a_bfloat16_model(site, sample, tmp_path):
    images = site.index(*sorted((sample / "images").glob("frame-*.jpg"))[:2])
    cache = real_build(sample, tmp_path, images, "bfloat16")
    model = Qwen3VLForConditionalGeneration.from_pretrained(sample / "model", dtype=torch.bfloat16)
    for key, path in images.path_of.items():
        patches, grid = site.processor.read(path)
        with torch.no_grad():
            output = model.model.visual(patches, grid_thw=torch.tensor([grid]), return_dict=True)
        expected = torch.stack([output.pooler_output, *output.deepstack_features], dim=1)
        assert cache[key].dtype == torch.bfloat16
        assert torch.equal(cache[key], expected)
