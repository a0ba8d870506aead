"""Where the images of a batch come from: the cache, or pixels.

Training uses the cache. Pixels are the plain way, decoding and preprocessing every image of every batch for a model
with its tower; they are here to compare with, in tests and in `lookonce bench step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.read import VisionCache
from lookonce.cache.store.receipts import Grid


class VisionSource(Protocol):
    """What the model gets as `pixel_values`, and each image's grid."""

    def grid_thw(self, key: str) -> Grid:
        """The patch grid of an image."""
        ...

    def load(self, keys: Sequence[str]) -> torch.Tensor:
        """The images one after the other, without padding.

        Features are `[tokens, levels, hidden]`, patches `[patches, patch_dim]`.
        """
        ...


class CachedFeatures:
    """Features of the cache, for a model with `CachedVisionTower`."""

    def __init__(self, cache: VisionCache) -> None:
        self.cache = cache

    def grid_thw(self, key: str) -> Grid:
        return self.cache.grid_thw(key)

    def load(self, keys: Sequence[str]) -> torch.Tensor:
        features = {key: self.cache[key] for key in set(keys)}
        return torch.cat([features[key] for key in keys])


class Pixels:
    """Patches made anew from the image files each time, for a stock model."""

    def __init__(self, processor: ImageProcessor, path_of: Mapping[str, Path]) -> None:
        self.processor, self.path_of = processor, path_of
        self._grids: dict[str, Grid] = {}

    def grid_thw(self, key: str) -> Grid:
        if key not in self._grids:
            self._grids[key] = self.processor.read(self.path_of[key])[1]
        return self._grids[key]

    def load(self, keys: Sequence[str]) -> torch.Tensor:
        return torch.cat([self.processor.read(self.path_of[key])[0] for key in keys])
