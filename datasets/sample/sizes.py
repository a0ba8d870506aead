"""Frames in the sizes of a real dataset, for measurements.

Design: sizes are stratified and not drawn. The few large images of Kvasir-VQA have many of its tokens. If sizes are
drawn for some dozens of frames, chance makes the mean number of tokens per question anything from 390 to 710, and two
such samples are not the same amount of work. So every split of a sample has each size in its exact share, as far as the
number of frames allows, both among frames with few questions and among frames with many.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lookonce.datasets.sample.scene import Scene
from lookonce.errors import UsageError

KVASIR_SIZES = Path("kvasir")
"""Instead of a file: the most frequent sizes of Kvasir-VQA, with about as many tokens per image (500 on average)."""
KVASIR_SHARES = {(622, 530): 38, (720, 576): 25, (768, 576): 26, (1280, 1024): 8, (1920, 1072): 3}
"""How many of a hundred images have each width and height."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Steps of this fraction of a circle fall evenly into every arc, however many there are
(https://en.wikipedia.org/wiki/Low-discrepancy_sequence#Additive_recurrence)."""

FrameSize = tuple[int, int]
"""The width and height of a frame."""


def read_sizes(path: Path) -> list[FrameSize]:
    """Read widths and heights from a CSV file with these columns, or return those of `KVASIR_SIZES`.

    Raises:
        UsageError: the path is neither.
    """
    if path == KVASIR_SIZES:
        return [size for size, share in KVASIR_SHARES.items() for _ in range(share)]
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            sizes = [(int(row["width"]), int(row["height"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _unusable(path, repr(error)) from None
    if not sizes:
        raise _unusable(path, "it has no rows")
    return sizes


def _unusable(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is neither `kvasir` nor a CSV file with whole numbers as `width` and `height` ({why})")


def stratify_sizes(
    numbered: Sequence[tuple[int, Scene]], sizes: Sequence[FrameSize], seed: int | str
) -> list[tuple[int, Scene]]:
    """Give numbered scenes these sizes, each in its share of them; the same seed gives the same result."""
    smallest_first = sorted(sizes, key=lambda size: size[0] * size[1])
    angle = random.Random(seed).random()
    result = []
    for number, scene in sorted(numbered, key=lambda one: (one[1].num_questions, one[0])):
        width, height = smallest_first[int(angle * len(sizes))]
        result.append((number, replace(scene, width=width, height=height)))
        angle = (angle + GOLDEN_RATIO) % 1
    return sorted(result, key=lambda one: one[0])
