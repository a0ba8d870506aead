"""One shard's images through the tower.

Design: images are read, decoded and cut into patches a few ahead on threads while the tower encodes. Each goes through
the tower alone, so its features do not depend on its neighbours. What can not be *decoded* is told apart from what can
not be *read*: a broken image is given up with its reason and the others go on, but a file that the disk does not give,
or whose bytes are no longer those that were hashed, stops the build, since trying again later may well succeed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lookonce.cache.pixels import ImageProcessor, decode
from lookonce.cache.shards import Grid
from lookonce.cache.tower import Tower
from lookonce.datasets.images import bytes_key, read_bytes
from lookonce.errors import BadImage, ImageError

NUM_READERS = 4
"""Threads that decode and patch images ahead of the tower."""


@dataclass(frozen=True)
class Encoded:
    """Some images after the tower."""

    features: dict[str, torch.Tensor] = field(default_factory=dict)
    """By image key, `[num_tokens, num_levels, hidden]`, on the CPU."""
    grids: dict[str, Grid] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Image key to the reason why there are none."""


def encode(
    keys: Iterable[str],
    images: Mapping[str, Path],
    processor: ImageProcessor,
    tower: Tower,
    done: Callable[[], Any] = lambda: None,
) -> Encoded:
    """Encode images (`images` has the file of each key); `done` is called after each.

    Raises:
        ImageError: a file can not be read, or has changed since it was hashed.
    """
    encoded = Encoded()
    for key, prepared in _ahead(lambda key: _prepare(key, images[key], processor), keys):
        try:
            patches, grid = prepared.result()
        except BadImage as error:
            encoded.failed[key] = str(error)
        else:
            features = tower.encode(patches, [grid])[0].cpu()
            if torch.isfinite(features).all():
                encoded.features[key], encoded.grids[key] = features, grid
            else:
                encoded.failed[key] = f"the tower's features of {images[key]} are not finite"
        done()
    return encoded


def _prepare(key: str, path: Path, processor: ImageProcessor) -> tuple[torch.Tensor, Grid]:
    data = read_bytes(path)
    if bytes_key(data) != key:
        raise ImageError(f"image {path} has changed since this build began; run the same command again")
    return processor.patches(decode(data, path), path)


def _ahead(function: Callable[[str], Any], keys: Iterable[str]) -> Iterator[tuple[str, Future[Any]]]:
    """Each key and the future of `function(key)`, in order, computed on threads a few ahead of the caller."""
    waiting: deque[tuple[str, Future[Any]]] = deque()
    with ThreadPoolExecutor(NUM_READERS) as threads:
        for key in keys:
            waiting.append((key, threads.submit(function, key)))
            if len(waiting) > 2 * NUM_READERS:
                yield waiting.popleft()
        yield from waiting
