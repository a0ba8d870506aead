"""Patches from 8-bit pixels: bit for bit those of the stock image processor, with any settings."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cache.model.pixels import ImageProcessor, Patcher
from lookonce.datasets.sample.model import MAX_PIXELS, MIN_PIXELS, write_image_processor
from lookonce.errors import BadImage

pytestmark = pytest.mark.guarantee("Patches made from 8-bit pixels have the bits of the stock processor's patches.")

CPU, DTYPES = torch.device("cpu"), [torch.float32, torch.bfloat16, torch.float16]

SIZES = [
    *((64, 64), (90, 60), (33, 400), (960, 536), (384, 288)),
    *((1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (3, 3), (4, 3), (3, 5), (1, 31), (31, 32), (32, 32), (33, 32)),
    *((1, 200), (200, 1), (2, 399), (1000, 5), (5, 1000), (3000, 16), (16, 3000), (1279, 1023)),
]


def stock_patches(stock: Qwen2VLImageProcessorPil, image: Image.Image) -> tuple[torch.Tensor, tuple[int, ...]]:
    output = stock(images=[image], return_tensors="pt")
    return output["pixel_values"], tuple(output["image_grid_thw"][0].tolist())


def assert_like_stock(processor: ImageProcessor, stock: Qwen2VLImageProcessorPil, image: Image.Image) -> None:
    """Resizing and splitting give the stock processor's patches bit for bit, in every dtype of a tower."""
    expected, grid = stock_patches(stock, image)
    resized, patcher = processor.resized(image, Path("image.png")), processor.patcher()
    assert resized.dtype == torch.uint8 and resized.shape[2] == 3
    assert patcher.grid_thw(resized) == grid
    for dtype in DTYPES:
        patches = patcher.to(CPU, dtype)([resized])
        assert patches.dtype == dtype
        assert torch.equal(patches, expected.to(dtype))


@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("limits", [(4_096, 25_600), (MIN_PIXELS, MAX_PIXELS)], ids=["tiny", "published"])
def test_patches_of_resized_images_equal_those_of_the_stock_processor(noise, tmp_path, limits, size):
    write_image_processor(tmp_path, *limits)
    assert_like_stock(ImageProcessor(tmp_path), Qwen2VLImageProcessorPil.from_pretrained(tmp_path), noise(size=size))


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32 - 1))
def test_patches_of_images_of_any_size_equal_those_of_the_stock_processor(noise, processor, width, height, seed):
    image = noise(size=(width, height), seed=seed)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(BadImage, match="image.png: .*aspect ratio"):
            processor.resized(image, Path("image.png"))
    else:
        assert_like_stock(processor, processor.stock, image)


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


@pytest.mark.parametrize("changes", OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_patches_follow_all_settings_of_the_stock_processor(noise, sample, tmp_path, changes):
    value = json.loads((sample / "model" / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(value | changes))
    processor, stock = ImageProcessor(tmp_path), Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    for size in [(90, 60), (33, 400), (1, 1), (500, 500)]:
        assert_like_stock(processor, stock, noise(size=size))


def test_without_resizing_only_images_of_whole_tokens_are_accepted(noise, sample, tmp_path):
    value = json.loads((sample / "model" / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(value | {"do_resize": False}))
    processor = ImageProcessor(tmp_path)
    assert_like_stock(processor, processor.stock, noise(size=(96, 64)))
    for size in [(96, 65), (80, 64)]:
        with pytest.raises(BadImage, match=f"^image.png: {size[0]} x {size[1]} pixels are not multiples of 32"):
            processor.resized(noise(size=size), Path("image.png"))


@pytest.mark.parametrize(("patch", "merge", "frames"), [(16, 2, 2), (14, 2, 2), (3, 3, 1), (1, 1, 1), (2, 4, 3)])
def test_each_pixel_is_normalised_by_its_channel_and_put_into_its_patch(patch, merge, frames):
    generator = torch.Generator().manual_seed(0)
    rows, columns = 3 * merge, 2 * merge
    image = torch.randint(0, 256, (rows * patch, columns * patch, 3), dtype=torch.uint8, generator=generator)
    table = torch.randn(3, 256, generator=generator)
    patches = Patcher(table, patch, merge, frames)([image]).view(rows * columns, 3, frames, patch, patch)
    number = 0
    for block_row in range(3):
        for block_column in range(2):
            for row in range(block_row * merge, (block_row + 1) * merge):
                for column in range(block_column * merge, (block_column + 1) * merge):
                    cut = image[row * patch : (row + 1) * patch, column * patch : (column + 1) * patch].long()
                    expected = torch.stack([table[channel][cut[:, :, channel]] for channel in range(3)])
                    assert torch.equal(patches[number], expected.unsqueeze(1).expand(3, frames, patch, patch))
                    number += 1


def test_patches_of_several_images_are_concatenated(noise, processor):
    images = [processor.resized(noise(size=size), Path("image.png")) for size in [(90, 60), (33, 400), (64, 64)]]
    patcher = processor.patcher()
    assert torch.equal(patcher(images), torch.cat([patcher([image]) for image in images]))


def test_the_table_has_all_values_of_each_channel(sample, tmp_path):
    value = json.loads((sample / "model" / "preprocessor_config.json").read_text())
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(value | {"image_mean": mean, "image_std": std}))
    values = torch.arange(256) / 255
    expected = torch.stack([(values - one) / other for one, other in zip(mean, std, strict=True)])
    assert torch.allclose(ImageProcessor(tmp_path).patcher().table, expected, atol=1e-6)


@pytest.mark.skipif(find_spec("torchvision") is None, reason="no torchvision")
@pytest.mark.parametrize("size", SIZES, ids="{0[0]}x{0[1]}".format)
def test_patches_of_the_torchvision_backend_equal_those_of_its_stock_processor(noise, sample, size):
    processor = ImageProcessor(sample / "model", "torchvision")
    assert_like_stock(processor, processor.stock, noise(size=size))
