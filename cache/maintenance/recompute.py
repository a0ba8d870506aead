"""Encode some images of a cache again, each alone, and compare: `cache verify --level recompute`.

Design: checksums prove that the bytes are those that were written; only this proves that they were right. Only this
finds a tower batch that mixed up its images, or a library that changed how it resizes. The images are drawn with a
seed, read again and identified by their bytes. What is compared is what a training gets, rounded to the stored dtype.

The error of a level is the norm of the difference divided by the norm of the tower's output, over all tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from lookonce.cache.build.encode import encode_image
from lookonce.cache.format import BUILD_COMMAND, REPAIR_COMMAND, DtypeName
from lookonce.cache.maintenance.verify import Problem, without_advice
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import check_fingerprint
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import image_key
from lookonce.errors import BadImage, CacheCorrupt, ImageError
from lookonce.text import count, duration

TOLERANCE: dict[DtypeName, float] = {"float32": 1e-5, "bfloat16": 2e-2, "fp8_e4m3": 6e-2}
"""Largest relative error that is allowed. float32: sums in another order, on other hardware or in another batch.
bfloat16 has 8 bits: a tower batch of several images on a GPU rounds differently from one image, by about 5e-3 in all.
fp8_e4m3 rounds such features again to 4 bits, 2.6e-2 of a vector's norm, and two close values may round either way."""


@dataclass(frozen=True)
class RecomputeReport:
    """How far the cache is from what the tower computes."""

    folder: Path
    num_compared: int
    num_skipped: int
    """Images that were drawn but whose file is gone or has changed."""
    tolerance: float
    worst_error: float
    worst_image: str
    """Key of the image with the worst error; empty if none was compared."""
    problems: list[Problem]
    errors: dict[str, list[float]] = field(repr=False)
    """The error of each level, by image key."""
    seconds: float

    def text(self) -> str:
        skipped = f", {self.num_skipped:,} skipped (file gone or changed)" if self.num_skipped else ""
        if self.num_compared or self.problems:
            same = "as the tower computes them" if self.worst_error else "bit for bit equal"
            state = count(len(self.problems), "problem") if self.problems else same
            did = f"{count(self.num_compared, 'image')} encoded again in {duration(self.seconds)}{skipped}: {state}"
        else:
            none = f", the cache has none of the run's; encode them with: {BUILD_COMMAND}"
            did = f"no image compared{skipped or none}"
        lines = [f"cache {self.folder}: {did}"]
        if self.worst_error > 0:
            where = f"level {self.errors[self.worst_image].index(self.worst_error)} of image {self.worst_image}"
            allowed = f"(allowed: {self.tolerance:.0e})"
            lines.append(f"  the largest relative error is {self.worst_error:.1e} {allowed}, in {where}")
        lines += [f"  {problem.text()}" for problem in self.problems]
        if self.problems:
            lines.append(
                f"if bytes are damaged, run: {REPAIR_COMMAND}; if features differ from the tower's, the cache was "
                "built with something that the fingerprint does not cover: move it away and build it again"
            )
        return "\n".join(lines)


def recompute(
    folder: Path,
    fingerprint: Fingerprint,
    files: Mapping[str, Path],
    processor: ImageProcessor,
    tower: Tower,
    num_images: int,
    seed: int = 0,
) -> RecomputeReport:
    """Encode again `num_images` that are both in the cache and in `files` (key to file), drawn with `seed`.

    Raises:
        CacheMismatch: the cache has another fingerprint.
        CacheError: it cannot be opened.
    """
    start = time.perf_counter()
    cache, tolerance = VisionCache.open(folder), TOLERANCE[fingerprint.dtype]
    check_fingerprint(folder, cache.fingerprint, fingerprint)
    stored = [key for key in sorted(files) if key in cache]
    drawn = random.Random(seed).sample(stored, min(num_images, len(stored)))
    errors: dict[str, list[float]] = {}
    problems: list[Problem] = []
    num_skipped = 0
    for key in tqdm(drawn, desc="encode again", unit="image", leave=False, disable=None):
        shard, _ = cache.entry(key)
        wrong = []
        try:
            if image_key(files[key]) != key:
                num_skipped += 1
                continue
            found, cached = encode_image(files[key], processor, tower, fingerprint), cache[key]
            if cached.shape == found.features.shape and cache.grid_thw(key) == found.grid_thw:
                errors[key] = relative_errors(cached, found.features)
            else:
                errors[key] = [float("inf")] * found.features.shape[1]
            for level, error in enumerate(errors[key]):
                if not error <= tolerance:
                    wrong.append(f"level {level} has a relative error of {error:.1e}, more than {tolerance:.0e}")
        except (BadImage, CacheCorrupt) as error:
            wrong.append(without_advice(error))
        except ImageError:
            num_skipped += 1
        problems += [Problem(shard, key, what, "image", str(files[key])) for what in wrong]
    worst_error, worst_image = max(((max(levels), key) for key, levels in errors.items()), default=(0.0, ""))
    return RecomputeReport(
        folder=folder,
        num_compared=len(errors),
        num_skipped=num_skipped,
        tolerance=tolerance,
        worst_error=worst_error,
        worst_image=worst_image,
        problems=problems,
        errors=errors,
        seconds=round(time.perf_counter() - start, 3),
    )


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Norm of the difference over the norm, for each level of features `[num_tokens, num_levels, hidden]`."""
    found, expected = found.double(), expected.double()
    difference = torch.linalg.vector_norm(found - expected, dim=(0, 2))
    errors: list[float] = (difference / torch.linalg.vector_norm(expected, dim=(0, 2)).clamp_min(1e-30)).tolist()
    return errors
