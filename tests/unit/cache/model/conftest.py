"""The sample's image processor, and images of noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lookonce.cache.model.pixels import ImageProcessor


@pytest.fixture(scope="session")
def processor(sample: Path) -> ImageProcessor:
    return ImageProcessor(sample / "model")


def noise(mode: str = "RGB", size: tuple[int, int] = (90, 60), seed: int = 0) -> Image.Image:
    """A random image; palettes, 16 bits and alpha hold random values too."""
    width, height = size
    rng = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 2**16, (height, width), dtype=np.uint16))
    if mode == "P":
        return noise("RGB", size).quantize(64)
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = rng.integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.merge(mode, [Image.fromarray(band) for band in np.moveaxis(pixels, 2, 0)])


@pytest.fixture(scope="session", name="noise")
def make_noise() -> Callable[..., Image.Image]:
    return noise
