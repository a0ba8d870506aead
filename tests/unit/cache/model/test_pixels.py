"""Image files as the tower's input: decoding and planned sizes as in the stock processor, and clear errors."""

from __future__ import annotations

import io
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import PIL
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lookonce.cache.model.pixels import ImageProcessor, decode
from lookonce.datasets.images import image_size
from lookonce.datasets.sample.model import MAX_PIXELS, MIN_PIXELS, write_image_processor
from lookonce.errors import ImageError, ModelError

TOKEN_SIDE = 32
"""Width and height of a token in pixels."""
MAX_TOKENS = 25
"""The most tokens of an image under the sample's pixel limits."""


def decoded(path: Path) -> np.ndarray:
    return np.asarray(decode(path.read_bytes(), path))


@pytest.mark.parametrize("size", [(64, 64), (90, 60), (384, 288), (33, 400), (1, 1), (960, 536)])
def test_patches_equal_those_of_the_stock_processor(noise, sample, tmp_path, processor, size):
    image = noise(size=size)
    image.save(tmp_path / "image.png")
    stock = Qwen2VLImageProcessorPil.from_pretrained(sample / "model")(images=[image], return_tensors="pt")
    patches, grid = processor.read(tmp_path / "image.png")
    assert patches.dtype == torch.float32
    assert torch.equal(patches, stock["pixel_values"])
    assert list(grid) == stock["image_grid_thw"][0].tolist()
    assert patches.shape == (np.prod(grid), 3 * 2 * 16 * 16)


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, lambda pixels: pixels),
        (2, np.fliplr),
        (3, lambda pixels: np.rot90(pixels, 2)),
        (4, np.flipud),
        (5, lambda pixels: pixels.transpose(1, 0, 2)),
        (6, lambda pixels: np.rot90(pixels, -1)),
        (7, lambda pixels: np.rot90(pixels, 2).transpose(1, 0, 2)),
        (8, lambda pixels: np.rot90(pixels, 1)),
    ],
)
def test_exif_rotation_is_applied(noise, tmp_path, processor, orientation, upright):
    image = noise(size=(120, 60))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "image.png", exif=exif)
    expected = Image.fromarray(np.ascontiguousarray(upright(np.asarray(image))))
    assert np.array_equal(decoded(tmp_path / "image.png"), np.asarray(expected))
    patches, grid = processor.read(tmp_path / "image.png")
    assert grid == processor(expected)[1]
    assert torch.equal(patches, processor(expected)[0])


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [
        ("RGB", "jpg"),
        ("L", "png"),
        ("L", "jpg"),
        ("LA", "png"),
        ("RGBA", "png"),
        ("P", "png"),
        ("P", "gif"),
        ("CMYK", "jpg"),
        ("CMYK", "tif"),
        ("I;16", "png"),
        pytest.param("YCbCr", "tif", marks=pytest.mark.skipif(PIL.__version__ < "13", reason="Pillow before 13")),
    ],
)
def test_images_of_any_mode_are_encoded_as_pil_converts_them(noise, tmp_path, processor, mode, suffix):
    path = tmp_path / f"image.{suffix}"
    noise(mode).save(path)
    with Image.open(path) as stored:
        assert stored.mode == mode
        expected = stored.convert("RGB")
    assert torch.equal(processor.read(path)[0], processor(expected)[0])


def test_black_and_white_images_are_encoded_as_pil_converts_them(noise, tmp_path, processor):
    noise("L").convert("1").save(tmp_path / "image.png")
    with Image.open(tmp_path / "image.png") as stored:
        assert stored.mode == "1"
        assert np.array_equal(decoded(tmp_path / "image.png"), np.asarray(stored.convert("RGB")))


def test_a_resized_file_is_decoded_in_the_same_way(noise, tmp_path, processor):
    image = noise("RGBA", size=(120, 60))
    image.save(tmp_path / "image.png")
    found = processor.resized_file(tmp_path / "image.png")
    assert torch.equal(found, processor.resized(image.convert("RGB"), Path("image.png")))


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_without_torchvision_its_backend_is_refused_and_pil_suggested(sample):
    with pytest.raises(ModelError, match="needs torchvision, which is not installed; use `pil`"):
        ImageProcessor(sample / "model", "torchvision")


SIDES = st.integers(1, 500)


@given(SIDES, SIDES)
def test_planned_tokens_equal_those_of_the_grid(processor, width, height):
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError, match="aspect ratio"):
            processor.num_tokens(width, height)
    else:
        patches, (t, h, w) = processor(Image.new("RGB", (width, height)))
        assert processor.num_tokens(width, height) == t * h * w // 4 == len(patches) // 4


@pytest.mark.parametrize("size", [(1, 1), (200, 300), (256, 256), (640, 512), (1279, 721), (100, 2000)])
def test_planned_tokens_equal_those_of_the_grid_with_the_published_limits(tmp_path, size):
    write_image_processor(tmp_path, MIN_PIXELS, MAX_PIXELS)
    processor = ImageProcessor(tmp_path)
    _, (t, h, w) = processor(Image.new("RGB", size))
    assert processor.num_tokens(*size) == t * h * w // 4


@pytest.mark.parametrize(
    ("limits", "size", "least", "most"),
    [
        ({}, (960, 960), 20, MAX_TOKENS),
        ({"max_pixels": 9 * TOKEN_SIDE**2}, (960, 960), 8, 9),
        ({"max_pixels": 100 * TOKEN_SIDE**2}, (960, 960), 90, 100),
        ({"min_pixels": 16 * TOKEN_SIDE**2}, (32, 32), 16, 20),
        ({"min_pixels": 16 * TOKEN_SIDE**2, "max_pixels": 16 * TOKEN_SIDE**2}, (500, 500), 16, 16),
    ],
)
def test_pixel_limits_override_those_of_the_folder(sample, limits, size, least, most):
    processor = ImageProcessor(sample / "model", **limits)
    assert processor.settings.items() >= limits.items()
    patches, _ = processor(Image.new("RGB", size))
    assert least <= len(patches) // 4 == processor.num_tokens(*size) <= most


def test_without_overrides_the_limits_are_those_of_the_folder(processor):
    found = processor.settings
    assert (found["min_pixels"], found["max_pixels"], found["backend"]) == (4_096, 25_600, "pil")
    assert processor.stock.size == {"shortest_edge": 4_096, "longest_edge": 25_600}


@pytest.mark.parametrize("limits", [{"min_pixels": 30_000}, {"max_pixels": 1024}, {"min_pixels": 9, "max_pixels": 8}])
def test_a_minimum_above_the_maximum_is_refused_with_both(sample, limits):
    both = {"min_pixels": 4_096, "max_pixels": 25_600} | limits
    expected = f"min_pixels {both['min_pixels']} is more than cache.max_pixels {both['max_pixels']}"
    with pytest.raises(ModelError, match=expected):
        ImageProcessor(sample / "model", **limits)


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_image_processor_settings_is_refused_by_name(sample, tmp_path, content):
    model = shutil.copytree(sample / "model", tmp_path / "model")
    (model / "preprocessor_config.json").unlink()
    if content:
        (model / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelError, match=f"{model} has no image processor settings .preprocessor_config.json.:"):
        ImageProcessor(model)


@pytest.mark.parametrize("size", [(1000, 2), (2, 1000)])
def test_an_impossible_aspect_ratio_is_an_image_error_that_names_the_file(tmp_path, processor, size):
    path = tmp_path / "stripe.png"
    Image.new("RGB", size).save(path)
    with pytest.raises(ImageError, match=f"{path}: .*aspect ratio"):
        processor.read(path)


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


def truncated(file_format: str) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((90, 60), 80).save(buffer, file_format)
    return buffer.getvalue()[:-300]


BROKEN = {
    "empty": b"",
    "text": b"this is not an image",
    "cut JPEG": truncated("JPEG"),
    "cut PNG": truncated("PNG"),
    "JPEG header alone": truncated("JPEG")[:20],
    "PNG signature alone": b"\x89PNG\r\n\x1a\n",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_image_is_an_image_error_that_names_the_file(tmp_path, processor, content):
    path = tmp_path / "image.jpg"
    path.write_bytes(content)
    with pytest.raises(ImageError, match=f"cannot decode image {path}: "):
        processor.read(path)


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir])
def test_a_missing_image_or_a_folder_is_an_image_error(tmp_path, processor, make):
    path = tmp_path / "image.jpg"
    make(path)
    with pytest.raises(ImageError, match=f"cannot read image {path}: "):
        processor.read(path)


# PIL warns at its limit and fails at twice that; only the failure matters here.
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_implausibly_large_image_is_an_image_error(tmp_path, processor, monkeypatch):
    path = tmp_path / "bomb.png"
    Image.new("L", (200, 200)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    with pytest.raises(ImageError, match="decompression bomb"):
        processor.read(path)
    assert image_size(path.read_bytes()) is None


def test_the_size_is_read_from_the_header_alone(noise, tmp_path):
    path = tmp_path / "image.jpg"
    noise(size=(90, 60)).save(path)
    path.write_bytes(path.read_bytes()[:-300])
    assert image_size(path.read_bytes()) == (90, 60)
