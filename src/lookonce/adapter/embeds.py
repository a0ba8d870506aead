"""Cached features as the `image_embeds` that vLLM takes instead of pixels, for Qwen3-VL.

N images, T tokens of all of them, L levels, H hidden.

Design: vLLM wants the levels beside one another, the merged output first, then the DeepStack levels in the order of
layers: it splits the last axis at H, and cuts the rest into L - 1 pieces of H. Images follow one another, and their
patch grids say where each ends (`_process_image_input` and `_compute_deepstack_embeds`, as read in
https://github.com/vllm-project/vllm/blob/4f5768c74b6f87eedb592dac8a7fe39f2aecb1ab/vllm/model_executor/models/qwen3_vl.py).
That is the layout of the cache, so nothing is computed and no value changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import image_key
from lookonce.errors import FeaturesMissing, UsageError
from lookonce.files import atomic_write
from lookonce.run.folder import claimed_around
from lookonce.text import count, rows, size

EMBEDS, GRIDS = "image_embeds", "image_grid_thw"
"""The names of vLLM's tensors."""


@dataclass(frozen=True)
class Exported:
    """The features of some images in vLLM's form."""

    file: str
    image_embeds: tuple[int, ...]
    """The shape: tokens of all images, hidden size times levels."""
    image_grid_thw: list[list[int]]
    """The patch grid of each image."""
    dtype: str
    num_levels: int
    """The merged output and the DeepStack levels."""
    size_bytes: int

    def text(self) -> str:
        """For people."""
        tokens, width = self.image_embeds
        levels = f"{self.num_levels} x {width // self.num_levels}"
        return rows(
            [
                ("images", f"{count(len(self.image_grid_thw), 'image')}, {count(tokens, 'token')}"),
                (EMBEDS, f"[{tokens}, {width}], {self.dtype}; levels beside one another: {levels}"),
                (GRIDS, f"[{len(self.image_grid_thw)}, 3]"),
                ("file", f"{self.file}, {size(self.size_bytes)}"),
            ]
        )


def export_embeds(cache: VisionCache, images: Sequence[Path], target: Path) -> Exported:
    """Write the features of image files to a new safetensors file.

    It has `image_embeds` `[T, H * L]` and `image_grid_thw` `[N, 3]`, int64.

    Raises:
        UsageError: the file exists.
        ImageError: an image cannot be read.
        FeaturesMissing: the cache lacks an image.
    """
    if target.exists():
        raise UsageError(f"{target} exists; name another file with -o, or remove it")
    keys = [image_key(path) for path in images]
    if absent := [path for path, key in zip(images, keys, strict=True) if key not in cache]:
        raise FeaturesMissing(
            f"{cache.folder} has no features of {absent[0]} ({count(len(absent), 'image')} of {len(images):,}); images "
            "are distinguished by their bytes. Add it to the records, then: lookonce cache build RUN.yaml"
        )
    tensors = {
        EMBEDS: torch.cat([one_TLH.flatten(1) for one_TLH in cache.get_many(keys)]),
        GRIDS: torch.tensor([cache.grid_thw(key) for key in keys], dtype=torch.int64),
    }
    metadata = {"image_keys": json.dumps(keys), "fingerprint": cache.fingerprint.sha256}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with claimed_around(target, "lookonce adapter embeds"), atomic_write(target, num_bytes) as temporary:
        save_file(tensors, temporary, metadata=metadata)
    embeds = tensors[EMBEDS]
    return Exported(
        file=str(target),
        image_embeds=tuple(embeds.shape),
        image_grid_thw=tensors[GRIDS].tolist(),
        dtype=str(embeds.dtype).removeprefix("torch."),
        num_levels=embeds.shape[1] // cache[keys[0]].shape[2],
        size_bytes=target.stat().st_size,
    )
