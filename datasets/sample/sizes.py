"""Frames in the sizes of a real set, to measure with.

Design: dealt, not drawn. The few large images of Kvasir-VQA carry many of its tokens, and among some dozens of frames
chance makes the mean number of tokens a question anything from 390 to 710; two such sets are not the same work. So
every part of a sample has each size as often as its number of frames allows, among those with few questions as among
those with many.
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
"""In place of a file of sizes: Kvasir-VQA's most frequent ones, with about as many visual tokens (500 on average)."""
KVASIR_SHARES = {(622, 530): 38, (720, 576): 25, (768, 576): 26, (1280, 1024): 8, (1920, 1072): 3}
"""Width and height, and in how many of a hundred images."""
GOLDEN_RATIO = (5**0.5 - 1) / 2
"""Steps of it around a circle fall evenly into every arc, however many are taken
(https://en.wikipedia.org/wiki/Low-discrepancy_sequence#Additive_recurrence)."""

FrameSize = tuple[int, int]
"""Width and height."""


def read_sizes(path: Path) -> list[FrameSize]:
    """Widths and heights of a CSV file with these columns, or of `KVASIR_SIZES`.

    Raises:
        UsageError: it is neither.
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


def deal_sizes(
    numbered: Sequence[tuple[int, Scene]], sizes: Sequence[FrameSize], seed: int | str
) -> list[tuple[int, Scene]]:
    """Give numbered scenes these sizes, each as often as it is among them; the same seed gives the same."""
    smallest_first = sorted(sizes, key=lambda size: size[0] * size[1])
    place = random.Random(seed).random()
    dealt = []
    for number, scene in sorted(numbered, key=lambda one: (one[1].num_questions, one[0])):
        width, height = smallest_first[int(place * len(sizes))]
        dealt.append((number, replace(scene, width=width, height=height)))
        place = (place + GOLDEN_RATIO) % 1
    return sorted(dealt, key=lambda one: one[0])
