"""What a cache will cost before it is built: the estimate behind `cache plan`.

Sizes come from image headers, times from a pilot: a few images of all sizes are decoded, encoded and written next to
the future cache, and removed. The pilot costs loading the tower and some seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lookonce.cache.build.encode import Encoder
from lookonce.cache.build.progress import Finished, new_shards, pending_shards, planned_images
from lookonce.cache.format import DtypeName
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import PlannedImage, Shard, read_plan, read_receipts
from lookonce.cache.store.shards import ShardWriter
from lookonce.datasets.images import ImageIndex
from lookonce.disk_space import existing, free_bytes, with_margin
from lookonce.files import scratch_folder
from lookonce.text import count, duration, rows, size

COMPARED: tuple[DtypeName, ...] = ("bfloat16", "fp8_e4m3")
PILOT_BYTES = 2_000_000_000
"""Free space that a pilot needs; six tower batches of the largest model take 1.6 GB."""
PILOT_BATCHES = 6
"""A pilot encodes at least this many tower batches, where a batch holds several images."""


@dataclass(frozen=True)
class Pilot:
    """How long it took to encode and write some images."""

    num_images: int
    num_tokens: int
    seconds: float
    tower_seconds: float

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(self.num_tokens, 1)


@dataclass(frozen=True)
class Estimate:
    folder: Path
    num_files: int
    num_images: int
    """Number of distinct images, without variants."""
    num_variants: int
    num_unusable: int
    num_done: int
    """Number of images and variants that are encoded already or known to be impossible."""
    num_tokens: int
    """Tokens of all distinct images and variants; the features are this many vectors for each level."""
    mean_tokens: float
    max_tokens: int
    num_bytes: int
    """Bytes of the features of all these images, in the dtype of the run file."""
    variant_bytes: int
    bytes_by_dtype: dict[str, int]
    missing_bytes: int
    num_new_shards: int
    free_bytes: int
    epoch_bytes: int
    """Bytes read in an epoch if every question reads its images."""
    pilot: Pilot | None
    build_seconds: float | None
    """Time that one worker on this machine needs for the missing images; a shard is the work of one worker."""
    break_even_epochs: float | None
    """Number of epochs after which building the cache has cost less than running the tower for every question."""

    def text(self) -> str:
        unusable = f", {self.num_unusable:,} cannot be read" if self.num_unusable else ""
        images = f"{count(self.num_files, 'file')}, {self.num_images:,} distinct{unusable}"
        added = f"{count(self.num_variants, 'variant')} (cache.augment), which take {size(self.variant_bytes)}"
        variants = f"; with {added}" if self.num_variants else ""
        sizes = ", ".join(f"{size(number)} in {dtype}" for dtype, number in self.bytes_by_dtype.items())
        enough = "" if self.free_bytes >= with_margin(self.missing_bytes) or not self.missing_bytes else ": NOT ENOUGH"
        shards = f"{count(self.num_new_shards, 'shard')} (files of features)"
        lines = [
            ("images", f"{images}, {self.num_done:,} encoded already{variants}"),
            ("tokens", f"{self.mean_tokens:.0f} per image on average, at most {self.max_tokens:,}"),
            ("size", f"{size(self.num_bytes)} ({sizes})"),
            ("to do", f"{shards}, {size(self.missing_bytes)}; {size(self.free_bytes)} free on the disk{enough}"),
            ("an epoch", f"reads {size(self.epoch_bytes)} if every question reads its image"),
        ]
        if self.pilot and self.build_seconds is not None:
            rate = f"{self.pilot.num_images / self.pilot.seconds:.1f} images/s in a pilot"
            lines.append(("time", f"{duration(self.build_seconds)} with one worker like this ({rate})"))
        if self.break_even_epochs is not None:
            lines.append(("pays off", f"after {self.break_even_epochs:.2f} epochs"))
        return rows([*lines, ("folder", str(self.folder))])


def estimate(
    folder: Path,
    fingerprint: Fingerprint,
    processor: ImageProcessor,
    images: ImageIndex,
    shard_bytes: int,
    epoch_images: Sequence[str],
    load_tower: Callable[[], Tower] | None,
    num_pilot: int,
) -> Estimate:
    """Estimate a build. `epoch_images` are the image keys of an epoch, one for each question.

    `load_tower` is None for no pilot.
    """
    planned = planned_images(images, processor)
    plan, finished = read_plan(folder), Finished.of(read_receipts(folder))
    tokens_of = {image.key: image.num_tokens for image in planned}
    variant_tokens = sum(image.num_tokens for image in planned if image.variant)
    pending = pending_shards(plan, finished, tokens_of)
    pending += new_shards(plan, finished, planned, fingerprint, shard_bytes)
    missing_tokens, num_tokens = sum(shard.num_tokens for shard in pending), sum(tokens_of.values())
    num_bytes = num_tokens * fingerprint.bytes_per_token
    epoch_tokens = sum(tokens_of.get(key, 0) for key in epoch_images)
    pilot = None
    if load_tower and free_bytes(folder) > with_margin(min(num_bytes, PILOT_BYTES)):
        pilot = run_pilot(folder, fingerprint, processor, images, planned, load_tower(), num_pilot)
    build_seconds = pilot.seconds_per_token * missing_tokens if pilot else None
    epoch_seconds = pilot.tower_seconds / max(pilot.num_tokens, 1) * epoch_tokens if pilot else 0
    return Estimate(
        folder=folder,
        num_files=images.num_files,
        num_images=images.num_distinct,
        num_variants=len(images.variants),
        num_unusable=len(images.unusable),
        num_done=len(tokens_of.keys() & finished.images),
        num_tokens=num_tokens,
        mean_tokens=num_tokens / max(len(planned), 1),
        max_tokens=max(tokens_of.values(), default=0),
        num_bytes=num_bytes,
        variant_bytes=variant_tokens * fingerprint.bytes_per_token,
        bytes_by_dtype={dtype: num_tokens * replace(fingerprint, dtype=dtype).bytes_per_token for dtype in COMPARED},
        missing_bytes=missing_tokens * fingerprint.bytes_per_token,
        num_new_shards=len(pending),
        free_bytes=free_bytes(folder),
        epoch_bytes=epoch_tokens * fingerprint.bytes_per_token,
        pilot=pilot,
        build_seconds=build_seconds,
        break_even_epochs=pilot.seconds_per_token * num_tokens / epoch_seconds if pilot and epoch_seconds else None,
    )


def run_pilot(
    folder: Path,
    fingerprint: Fingerprint,
    processor: ImageProcessor,
    images: ImageIndex,
    planned: Sequence[PlannedImage],
    tower: Tower,
    num_images: int,
) -> Pilot | None:
    """Encode and write some images of all sizes, twice: the first time warms up. None if none can be encoded.

    Takes `num_images`, or `PILOT_BATCHES` tower batches if that is more.
    """
    by_size = sorted((image for image in planned if image.num_tokens), key=lambda image: image.num_tokens)
    mean = sum(image.num_tokens for image in by_size) / max(len(by_size), 1)
    num_images = max(num_images, round(PILOT_BATCHES * tower.tokens_per_tower_batch / max(mean, 1)))
    step = max(len(by_size) // max(num_images, 1), 1)
    shard = Shard("pilot", tuple(by_size[step // 2 :: step][:num_images]))
    if not shard.images:
        return None
    encoder = Encoder(images.path_of, processor, tower, fingerprint)
    try:
        with scratch_folder(existing(folder.parent), "pilot") as scratch:
            for _ in range(2):
                before, start = encoder.stopwatch.seconds().get("tower", 0.0), time.perf_counter()
                with ShardWriter(scratch, shard.name, fingerprint, len(shard.images)) as writer:
                    num_encoded = 0
                    for batch in encoder.run([shard]):
                        writer.add(batch.images)
                        num_encoded += len(batch.images)
                    writer.commit()
                seconds = time.perf_counter() - start
            tower_seconds = encoder.stopwatch.seconds()["tower"] - before if num_encoded else 0.0
    finally:
        encoder.close()
    return Pilot(num_encoded, shard.num_tokens, seconds, tower_seconds) if num_encoded else None
