"""Features of any images, by key: read from the run's cache if it has them, else encoded when they are needed.

Design: a `FeatureSource` whose images come and go. Images are encoded as by a build of the cache, in tower batches and
decoded ahead, so on a CPU they have the bits that the cache would have. The tower is loaded with the first image that
the cache lacks, and stays. Nothing is written to the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import ClassVar

import torch

from lookonce.cache.build.encode import Encoder, ImageFeatures
from lookonce.cache.build.progress import planned_tokens
from lookonce.cache.format import Grid
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.claims import using
from lookonce.cache.store.metadata import MANIFEST, PlannedImage, Shard
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.datasets.images import ImageIndex
from lookonce.errors import ImageError
from lookonce.run.open import OpenRun
from lookonce.train.data.batches import CPU


class LiveFeatures:
    """The features of images that are asked about."""

    has_tower: ClassVar[bool] = False

    def __init__(self, opened: OpenRun) -> None:
        self._opened = opened
        self._encoded: dict[str, ImageFeatures] = {}

    @property
    def _is_built(self) -> bool:
        return (self._opened.cache_folder / MANIFEST).exists()

    @cached_property
    def _cache(self) -> VisionCache | None:
        """The run's cache, if it is built; it may lack any image."""
        opened = self._opened
        if not self._is_built:
            return None
        return find_cache(opened.run.cache.dir, opened.fingerprint, check=opened.run.cache.check)

    @cached_property
    def _tower(self) -> Tower:
        return self._opened.load_tower()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep others from changing the cache within the block.

        Raises:
            CacheError: another process repairs it.
        """
        if not self._is_built:
            yield
        else:
            with using(self._opened.cache_folder, "lookonce predict", self._opened.run.cache.claim_s):
                yield

    def encode(self, images: ImageIndex, keys: Collection[str]) -> dict[str, ImageError]:
        """Encode those of some images that are neither in the cache nor in memory; returns the errors by key."""
        missing = [key for key in keys if key not in self._encoded and not (self._cache and key in self._cache)]
        if not missing:
            return {}
        failed: dict[str, ImageError] = {}
        fingerprint = self._opened.fingerprint
        encoder = Encoder(images.path_of, self._opened.processor, self._tower, fingerprint)
        with contextlib.closing(encoder):
            for batch in encoder.run([self._shard(images, missing)]):
                failed |= {key: ImageError(failure.reason) for key, failure in batch.failed.items()}
                for image in batch.images:
                    self._encoded[image.key] = ImageFeatures.of(image.tensors, image.grid_thw, fingerprint)
        return failed

    def _shard(self, images: ImageIndex, keys: Sequence[str]) -> Shard:
        return Shard(
            "the images of a round",
            tuple(PlannedImage(key, self.num_tokens(images, key), (str(images.path_of[key]),)) for key in keys),
        )

    def num_tokens(self, images: ImageIndex, key: str) -> int:
        """About the number of an image's tokens, by its header."""
        return planned_tokens(self._opened.processor, images.size_of.get(key))

    @property
    def in_memory(self) -> Collection[str]:
        """The keys of the images that were encoded and not dropped."""
        return self._encoded.keys()

    def drop(self, keys: Collection[str]) -> None:
        """Forget the features of some images that were encoded."""
        for key in keys:
            del self._encoded[key]

    def grid_thw(self, key: str) -> Grid:
        if key in self._encoded:
            return self._encoded[key].grid_thw
        assert self._cache is not None
        return self._cache.grid_thw(key)

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        found = {key: self._encoded[key].features for key in keys if key in self._encoded}
        if self._cache and (cached := [key for key in dict.fromkeys(keys) if key not in found]):
            found |= zip(cached, self._cache.get_many(cached, pin=device.type == "cuda"), strict=True)
        on_device = {key: features.to(device, non_blocking=True) for key, features in found.items()}
        return torch.cat([on_device[key] for key in keys])
