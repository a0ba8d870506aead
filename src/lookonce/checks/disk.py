"""Disk space: for the features that the cache lacks, and for checkpoints and adapter."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lookonce.cache.format import STORAGE
from lookonce.checks.images import CheckedImages
from lookonce.checks.model import CheckedModel
from lookonce.checks.report import Result
from lookonce.disk_space import existing, free_bytes, with_margin
from lookonce.run.config import RunFile
from lookonce.text import size

STATE_BYTES = 3 * 4
"""Bytes of a checkpoint for each trained weight: the weight and Adam's two moments, in float32."""
ADAPTER_BYTES = 4


def check_disk(run: RunFile, model: CheckedModel, images: CheckedImages, is_complete: bool) -> list[Result]:
    """Whether what the run will write fits; two folders on one disk count together."""
    needs: dict[int, list[tuple[str, Path, int]]] = defaultdict(list)
    for what, folder, num_bytes in _needs(run, model, images):
        needs[os.stat(existing(folder)).st_dev].append((what, folder, num_bytes))
    return [_compare(those, is_complete) for those in needs.values()]


def _needs(run: RunFile, model: CheckedModel, images: CheckedImages) -> Iterator[tuple[str, Path, int]]:
    if model.model_folder and images.to_encode:
        shape = model.model_folder.family.feature_shape(model.model_folder.vision_config)
        each = STORAGE[run.cache.dtype].bytes_per_token(*shape)
        yield "features", run.cache.dir, each * sum(images.tokens.get(path, 0) for path in images.to_encode)
    if model.num_trained:
        number = run.train.save_total_limit + 1  # an old one is deleted once the new one is written
        yield "checkpoints", run.output, model.num_trained * (number * STATE_BYTES + ADAPTER_BYTES)


def _compare(needs: list[tuple[str, Path, int]], is_complete: bool) -> Result:
    free, total = free_bytes(needs[0][1]), sum(num_bytes for _, _, num_bytes in needs)
    parts = ", ".join(f"{size(num_bytes)} {what} in {folder}" for what, folder, num_bytes in needs)
    least = "" if is_complete else "at least "
    if free >= with_margin(total):
        return Result("ok", "disk", f"{least}{parts}; {size(free)} free")
    missing = f"{least}{parts}; only {size(free)} free, {size(with_margin(total) - free)} missing"
    return Result("error", "disk", missing, "make room, choose another `cache.dir`, or halve it: cache.dtype=fp8_e4m3")
