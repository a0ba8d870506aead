"""Sources of a batch's images: cached features, or pixels.

Training reads cached features. `Pixels` does what stock training does: it decodes and preprocesses every image of every
batch, for a model with its tower. It serves as the baseline in tests and in `lookonce bench step`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from lookonce.cache.format import Grid
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.reader import VisionCache

CPU = torch.device("cpu")
Batch = dict[str, torch.Tensor]


class FeatureSource(Protocol):
    """Provides the model's `pixel_values`, and the patch grid of each image."""

    has_tower: ClassVar[bool]
    """Whether the model has its tower, which needs the grids on the device. Otherwise grids stay on the CPU, where
    reading them forces no host-device sync."""

    def grid_thw(self, key: str) -> Grid:
        """An image's patch grid: time, height, width."""
        ...

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        """The images one after another, without padding, on a device.

        Shapes: features `[num_tokens, num_levels, hidden]`, patches `[num_patches, patch_dim]`.
        """
        ...


def image_inputs(source: FeatureSource, keys: Sequence[str], device: torch.device = CPU) -> Batch:
    """The model's inputs for these images; empty if there are none."""
    if not keys:
        return {}
    grids = torch.tensor([source.grid_thw(key) for key in keys], device=device if source.has_tower else CPU)
    return {"pixel_values": source.load(keys, device), "image_grid_thw": grids}


class CachedFeatures:
    """Features from the cache, for a model with `CachedVisionTower`.

    The most recently used images stay in memory, up to `max_bytes`; for a GPU this is page-locked memory. Each image of
    a batch is read once, however often it occurs there.
    """

    has_tower: ClassVar[bool] = False

    def __init__(self, cache: VisionCache, max_bytes: int = 0) -> None:
        self.cache, self.max_bytes = cache, max_bytes
        self.bytes_read = 0
        """Number of bytes read from disk so far."""
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._num_kept_bytes = 0
        self._lock = threading.Lock()

    def grid_thw(self, key: str) -> Grid:
        return self.cache.grid_thw(key)

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        with self._lock:
            features = self._features(list(dict.fromkeys(keys)), pin=device.type == "cuda")
        on_device = {key: tensor.to(device, non_blocking=True) for key, tensor in features.items()}
        return torch.cat([on_device[key] for key in keys])

    def _features(self, keys: list[str], pin: bool) -> dict[str, torch.Tensor]:
        missing = [key for key in keys if key not in self._kept]
        read = dict(zip(missing, self.cache.get_many(missing, pin=pin), strict=True))
        self.bytes_read += sum(tensor.nbytes for tensor in read.values())
        found = {key: read[key] if key in read else self._kept[key] for key in keys}
        self._keep(found)
        return found

    def _keep(self, features: Mapping[str, torch.Tensor]) -> None:
        for key, tensor in features.items():
            if key not in self._kept:
                self._num_kept_bytes += tensor.nbytes
            self._kept[key] = tensor
            self._kept.move_to_end(key)
        while self._num_kept_bytes > self.max_bytes:
            self._num_kept_bytes -= self._kept.popitem(last=False)[1].nbytes


class Pixels:
    """Patches made from the image files every time, for a stock model."""

    has_tower: ClassVar[bool] = True

    def __init__(self, processor: ImageProcessor, path_of: Mapping[str, Path]) -> None:
        self.processor, self.path_of = processor, path_of
        self._grids: dict[str, Grid] = {}

    def grid_thw(self, key: str) -> Grid:
        if key not in self._grids:
            self._grids[key] = self.processor.read(self.path_of[key])[1]
        return self._grids[key]

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        return torch.cat([self.processor.read(self.path_of[key])[0] for key in keys]).to(device)
