"""Where the images of a batch come from: the cache, or pixels.

Training uses the cache. Pixels are the plain way, decoding and preprocessing every image of every batch for a model
with its tower; they are here to compare with, in tests and in `lookonce bench step`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.receipts import Grid

CPU = torch.device("cpu")
Batch = dict[str, torch.Tensor]


class VisionSource(Protocol):
    """What the model gets as `pixel_values`, and each image's grid."""

    has_tower: ClassVar[bool]
    """Whether they go through a tower, which computes with grids; else these stay where the CPU reads them at once."""

    def grid_thw(self, key: str) -> Grid:
        """The patch grid of an image."""
        ...

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        """The images one after the other, without padding, on a device.

        Features are `[tokens, levels, hidden]`, patches `[patches, patch_dim]`.
        """
        ...


def images(vision: VisionSource, keys: Sequence[str], device: torch.device = CPU) -> Batch:
    """What a model takes of these images; nothing if there are none."""
    if not keys:
        return {}
    grids = torch.tensor([vision.grid_thw(key) for key in keys], device=device if vision.has_tower else CPU)
    return {"pixel_values": vision.load(keys, device), "image_grid_thw": grids}


class CachedFeatures:
    """Features of the cache, for a model with `CachedVisionTower`.

    The images used last stay in memory, up to `max_bytes`; on a GPU, in page-locked memory. Each image of a batch is
    read once, however often it occurs there.
    """

    has_tower: ClassVar[bool] = False

    def __init__(self, cache: VisionCache, max_bytes: int = 0) -> None:
        self.cache, self.max_bytes = cache, max_bytes
        self.bytes_read = 0
        """From disk, so far."""
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._num_kept_bytes = 0
        self._lock = threading.Lock()

    def grid_thw(self, key: str) -> Grid:
        return self.cache.grid_thw(key)

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        with self._lock:
            features = self._features(list(dict.fromkeys(keys)), pin=device.type == "cuda")
        there = {key: tensor.to(device, non_blocking=True) for key, tensor in features.items()}
        return torch.cat([there[key] for key in keys])

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
    """Patches made anew from the image files each time, for a stock model."""

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
