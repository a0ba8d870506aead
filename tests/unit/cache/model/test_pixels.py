"""Pixels and patches: bit for bit those of the stock processor, planned sizes, and clear errors."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.sample.model import MAX_PIXELS, MIN_PIXELS, write_image_processor
from lookonce.errors import BadImage, ModelError


@pytest.fixture(scope="session")
def processor(sample: Path) -> ImageProcessor:
    return ImageProcessor(sample / "model")


def noise(size: tuple[int, int], seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


STOCK_PATCHES = pytest.mark.guarantee(
    "Patches made from 8-bit pixels are bit-identical to the stock processor's patches."
)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_without_torchvision_its_backend_is_refused_and_pil_suggested(sample):
    with pytest.raises(ModelError, match="needs torchvision, which is not installed; use `pil`"):
        ImageProcessor(sample / "model", "torchvision")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"min_pixels": 30_000}, "cache.min_pixels 30000 is more than size.longest_edge 25600 in .*config.json; lower"),
        (
            {"max_pixels": 1024},
            "size.shortest_edge 4096 in .*preprocessor_config.json is more than cache.max_pixels 1024;",
        ),
        ({"min_pixels": 9, "max_pixels": 8}, "cache.min_pixels 9 is more than cache.max_pixels 8; lower"),
    ],
)
def test_a_minimum_above_the_maximum_is_refused_with_both_and_where_they_are_set(sample, limits, expected):
    with pytest.raises(ModelError, match=expected):
        ImageProcessor(sample / "model", **limits)


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_image_processor_settings_is_refused_by_name(model, content):
    (model / "preprocessor_config.json").unlink()
    if content:
        (model / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelError, match=f"{model} has no image processor settings .preprocessor_config.json.:"):
        ImageProcessor(model)


@pytest.mark.parametrize(
    "settings",
    [{"min_pixels": 4_096, "max_pixels": 25_600}, {"size": {"shortest_edge": 4_096, "longest_edge": 25_600}}],
)
def test_limits_apply_to_settings_of_either_style(sample, tmp_path, settings):
    value = json.loads((sample / "model" / "preprocessor_config.json").read_text())
    value.pop("size")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(value | settings))
    processor = ImageProcessor(tmp_path, max_pixels=100_000)
    assert (processor.settings["min_pixels"], processor.settings["max_pixels"]) == (4_096, 100_000)
    width, height = 640, 480
    grid = processor(Image.new("RGB", (width, height)))[1]
    assert 25_600 < grid[1] * grid[2] * 16**2 <= 100_000
    assert processor.num_tokens(width, height) == grid[1] * grid[2] // 4


def test_settings_without_limits_are_refused(sample, tmp_path):
    value = json.loads((sample / "model" / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(value | {"size": {"height": 64, "width": 64}}))
    with pytest.raises(ModelError, match="preprocessor_config.json has no limits"):
        ImageProcessor(tmp_path)


CPU, DTYPES = torch.device("cpu"), [torch.float32, torch.bfloat16, torch.float16]

SIZES = [
    *((64, 64), (90, 60), (33, 400), (960, 536), (384, 288)),
    *((1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (3, 3), (4, 3), (3, 5), (1, 31), (31, 32), (32, 32), (33, 32)),
    *((1, 200), (200, 1), (2, 399), (1000, 5), (5, 1000), (3000, 16), (16, 3000), (1279, 1023)),
]


def assert_like_stock(processor: ImageProcessor, stock: Qwen2VLImageProcessorPil, image: Image.Image) -> None:
    """Resizing and splitting give the stock processor's patches bit for bit, in every dtype of a tower."""
    expected = stock(images=[image], return_tensors="pt")
    resized, patcher = processor.resized(image, Path("image.png")), processor.patcher()
    assert resized.dtype == torch.uint8 and resized.shape[2] == 3
    assert list(patcher.grid_thw(resized)) == expected["image_grid_thw"][0].tolist()
    for dtype in DTYPES:
        patches = patcher.to(CPU, dtype)([resized])
        assert patches.dtype == dtype
        assert torch.equal(patches, expected["pixel_values"].to(dtype))


@STOCK_PATCHES
@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("limits", [(4_096, 25_600), (MIN_PIXELS, MAX_PIXELS)], ids=["tiny", "published"])
def test_patches_of_resized_images_equal_those_of_the_stock_processor(tmp_path, limits, size):
    write_image_processor(tmp_path, *limits)
    assert_like_stock(ImageProcessor(tmp_path), Qwen2VLImageProcessorPil.from_pretrained(tmp_path), noise(size=size))


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32 - 1))
@STOCK_PATCHES
def test_images_of_any_size_have_the_patches_of_the_stock_processor_and_the_planned_tokens(
    processor, width, height, seed
):
    image = noise(size=(width, height), seed=seed)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(BadImage, match="image.png: .*aspect ratio"):
            processor.resized(image, Path("image.png"))
        with pytest.raises(ValueError, match="aspect ratio"):
            processor.num_tokens(width, height)
    else:
        assert_like_stock(processor, processor.stock, image)
        patches, (t, h, w) = processor(image)
        assert processor.num_tokens(width, height) == t * h * w // 4 == len(patches) // 4


OTHER_SETTINGS = {
    "mean and std of CLIP": {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.2758],
    },
    "one setting per channel": {"image_mean": [0.0, 0.25, 1.0], "image_std": [1.0, 0.1, 3.0]},
    "not normalised": {"do_normalize": False},
    "not rescaled": {"do_rescale": False},
    "neither": {"do_rescale": False, "do_normalize": False},
    "another factor": {"rescale_factor": 1 / 127.5},
    "patches of 14": {"patch_size": 14},
    "one frame": {"temporal_patch_size": 1},
    "blocks of 3": {"merge_size": 3, "patch_size": 8},
    "blocks of 1": {"merge_size": 1},
    "small patches": {"merge_size": 1, "patch_size": 2},
    "bilinear": {"resample": 2},
    "nearest": {"resample": 0},
}


@STOCK_PATCHES
@pytest.mark.parametrize("changes", OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_patches_follow_all_settings_of_the_stock_processor(sample, tmp_path, changes):
    value = json.loads((sample / "model" / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(value | changes))
    processor, stock = ImageProcessor(tmp_path), Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    for size in [(90, 60), (33, 400), (1, 1), (500, 500)]:
        assert_like_stock(processor, stock, noise(size=size))


@STOCK_PATCHES
def test_without_resizing_only_images_of_whole_tokens_are_accepted(sample, tmp_path):
    value = json.loads((sample / "model" / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(value | {"do_resize": False}))
    processor = ImageProcessor(tmp_path)
    assert_like_stock(processor, processor.stock, noise(size=(96, 64)))
    for size in [(96, 65), (80, 64)]:
        with pytest.raises(BadImage, match=f"^image.png: {size[0]} x {size[1]} pixels are not multiples of 32"):
            processor.resized(noise(size=size), Path("image.png"))


@STOCK_PATCHES
@pytest.mark.skipif(find_spec("torchvision") is None, reason="no torchvision")
@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
def test_patches_of_the_torchvision_backend_equal_those_of_its_stock_processor(sample, size):
    processor = ImageProcessor(sample / "model", "torchvision")
    assert_like_stock(processor, processor.stock, noise(size=size))
