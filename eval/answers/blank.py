"""Grey images in place of all others: a `FeatureSource` for the blank baseline.

Design: each grey image has the size of the image that it replaces, after resizing, so prompts keep their tokens. The
features of a size are computed once, when the first answer needs them, with the run's tower as for its cache; the tower
is then released. They are in memory until the evaluation ends, 8 MB a thousand tokens of an 8B, and never in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import torch

from lookonce.cache.build.encode import ImageFeatures, encode_patches
from lookonce.cache.constants import Grid
from lookonce.run.open import OpenRun
from lookonce.train.data.features import CPU

GREY = 128
"""The value of each pixel in each channel."""


class BlankImages:
    """The features of a grey image for each key."""

    has_tower: ClassVar[bool] = False

    def __init__(self, opened: OpenRun, grids: Mapping[str, Grid]) -> None:
        """`grids` are those of the images that are replaced, by their keys."""
        self._opened, self._grids = opened, grids

    def grid_thw(self, key: str) -> Grid:
        return self._grids[key]

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        return torch.cat([self._of_grid[self._grids[key]].features for key in keys]).to(device)

    @cached_property
    def _of_grid(self) -> dict[Grid, ImageFeatures]:
        """The features of a grey image of each grid."""
        tower, fingerprint = self._opened.load_tower(), self._opened.fingerprint
        patcher = self._opened.processor.patcher()

        def encode(grid: Grid) -> ImageFeatures:
            height, width = (number * patcher.patch_size for number in grid[1:])
            pixels = torch.full((height, width, 3), GREY, dtype=torch.uint8)
            return encode_patches(patcher([pixels]), grid, tower, fingerprint)

        with torch.autocast(tower.device.type, enabled=False):  # answers are given under it, caches built without
            return {grid: encode(grid) for grid in sorted(set(self._grids.values()))}
