"""How fast a cache is built, beside what limits it: the measurements behind `lookonce bench cache`.

Measured together, over the same images: the tower alone on patches that are already on the GPU, the disk alone, the
build from end to end (JPEG decoding to fsync), and a stock loop (stock processor, stock tower, safetensors, one image
at a time). The build cannot be faster than the slower of the first two, so its share of that limit is the main result.
The disk is measured before and after the build and averaged, because disks are not steady. The build is warmed up with
a few tower batches. Its phases are busy seconds of all threads or of the GPU; they overlap, so their sum exceeds the
elapsed time.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from lookonce.bench.matmul import matmul_flops_per_second, synchronize
from lookonce.cache.build.progress import planned_images
from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Fingerprint, raw_bytes
from lookonce.cache.store.metadata import PlannedImage, cut
from lookonce.cache.store.shards import NUM_WRITERS, DirectFile
from lookonce.datasets.images import ImageIndex, read_bytes
from lookonce.disk_space import existing
from lookonce.errors import ImageError, UsageError
from lookonce.files import scratch_folder
from lookonce.text import rows, table

BLOCK_BYTES = 1 << 24
"""Size of a write of the disk alone: large enough for any disk."""
WARM_UP_BATCHES = 6


@dataclass(frozen=True)
class CacheBench:
    """What was measured. All over the same images, except for the stock loop: over the first `num_plain`."""

    device: str
    num_images: int
    num_tokens: int
    num_bytes: int
    num_plain: int
    tower_seconds: float
    disk_seconds: float
    engine_seconds: float
    plain_seconds: float
    tower_flop: float
    matmul_flops: float
    """The device's measured rate for large products in the tower's dtype."""
    phases: dict[str, float]

    @property
    def limit_seconds(self) -> float:
        """Seconds of the tower alone or the disk alone, whichever is slower."""
        return max(self.tower_seconds, self.disk_seconds)

    @property
    def share_of_limit(self) -> float:
        return self.limit_seconds / self.engine_seconds

    @property
    def speedup(self) -> float:
        """How many times faster the build is than the stock loop."""
        return self.plain_seconds / self.num_plain / (self.engine_seconds / self.num_images)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"share_of_limit": self.share_of_limit, "speedup": self.speedup}

    def text(self) -> str:
        measured = (
            ("tower alone, patches on the device", self.num_images, self.tower_seconds),
            ("disk alone, the same bytes", self.num_images, self.disk_seconds),
            ("build, from image files to shards", self.num_images, self.engine_seconds),
            ("stock loop, image by image", self.num_plain, self.plain_seconds),
        )
        per_image = self.num_bytes / self.num_images
        lines = [
            (name, f"{number / seconds:.1f}", f"{number / seconds * per_image / 1e9:.2f}", f"{seconds:.2f}")
            for name, number, seconds in measured
        ]
        achieved = self.tower_flop / self.tower_seconds
        facts = [
            ("images", f"{self.num_images:,}, {self.num_tokens / self.num_images:.0f} tokens each, {self.device}"),
            ("build", f"{self.share_of_limit:.0%} of its limit, {self.speedup:.1f} times as fast as the stock loop"),
            ("tower", f"{achieved / 1e12:.0f} TFLOP/s, {achieved / self.matmul_flops:.0%} of the measured matrix rate"),
        ]
        phases = [(name, f"{seconds:.2f}") for name, seconds in sorted(self.phases.items(), key=lambda item: -item[1])]
        return "\n\n".join(
            [
                table(("", "images/s", "GB/s", "seconds"), lines),
                rows(facts),
                table(("phases of the build (overlapping)", "seconds"), phases),
            ]
        )


def bench_cache(
    scratch_root: Path,
    fingerprint: Fingerprint,
    processor: ImageProcessor,
    images: ImageIndex,
    tower: Tower,
    load_stock: Callable[[], Any],
    shard_bytes: int,
    num_plain: int,
) -> CacheBench:
    """Take all four measurements over `images`, in scratch folders below `scratch_root`.

    `load_stock` returns transformers' own tower, for the stock loop.
    """
    wanted = [image for image in planned_images(images, processor) if _is_sound(image, images, processor)]
    if not wanted:
        raise UsageError("no image of the run can be decoded; name a run file whose records have images")
    num_tokens = sum(image.num_tokens for image in wanted)
    tower_seconds = _tower_alone(wanted, images, processor, tower)
    num_bytes = sum(image.num_tokens for image in wanted) * fingerprint.bytes_per_token
    options = BuildOptions(shard_bytes)
    with scratch_folder(existing(scratch_root), "bench") as folder:
        warm_up = images.first(_num_warm_up(wanted, tower))  # allocating pinned memory is slow the first time
        build_cache(folder, fingerprint, processor, warm_up, lambda: tower, options)
    with scratch_folder(existing(scratch_root), "bench") as folder:
        before = disk_alone(folder, num_bytes, shard_bytes)
        start = time.perf_counter()
        report = build_cache(folder, fingerprint, processor, images, lambda: tower, options)
        engine_seconds = time.perf_counter() - start
    with scratch_folder(existing(scratch_root), "bench") as folder:
        disk_seconds = (before + disk_alone(folder, num_bytes, shard_bytes)) / 2
    with scratch_folder(existing(scratch_root), "bench") as folder:
        plain_seconds = _stock_loop(folder, wanted[:num_plain], images, processor, load_stock(), tower.dtype)
    return CacheBench(
        device=torch.cuda.get_device_name(tower.device) if tower.device.type == "cuda" else "CPU",
        num_images=report.num_encoded,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        num_plain=min(num_plain, len(wanted)),
        tower_seconds=tower_seconds,
        disk_seconds=disk_seconds,
        engine_seconds=engine_seconds,
        plain_seconds=plain_seconds,
        tower_flop=sum(tower.flop(image.num_tokens) for image in wanted),
        matmul_flops=matmul_flops_per_second(tower.device, tower.dtype),
        phases=report.phases,
    )


def _is_sound(image: PlannedImage, images: ImageIndex, processor: ImageProcessor) -> bool:
    """Whether an image can be decoded; reading it also brings it into the page cache, for all measurements alike."""
    with contextlib.suppress(ImageError):
        processor.resized_file(images.path_of[image.key])
        return image.num_tokens > 0
    return False


def _num_warm_up(wanted: Sequence[PlannedImage], tower: Tower) -> int:
    """Number of images that make some tower batches."""
    mean = sum(image.num_tokens for image in wanted) / len(wanted)
    return max(round(WARM_UP_BATCHES * tower.tokens_per_tower_batch / mean), 1)


def _tower_alone(wanted: Sequence[PlannedImage], images: ImageIndex, processor: ImageProcessor, tower: Tower) -> float:
    """Seconds of the tower for all images, in the tower batches of a build; the second of two rounds."""
    patcher = processor.patcher().to(tower.device, tower.dtype)
    batches = []
    for batch in cut(sorted(wanted, key=lambda image: (image.num_tokens, image.key)), tower.tokens_per_tower_batch):
        pixels = [processor.resized_file(images.path_of[image.key]).to(tower.device) for image in batch]
        batches.append((patcher(pixels), [patcher.grid_thw(image) for image in pixels]))
    seconds = 0.0
    for _ in range(2):
        synchronize(tower.device)
        start = time.perf_counter()
        for patches, grids in batches:
            tower.encode(patches, grids)
        synchronize(tower.device)
        seconds = time.perf_counter() - start
    return seconds


def disk_alone(folder: Path, num_bytes: int, file_bytes: int) -> float:
    """Seconds to write `num_bytes` into flushed files of `file_bytes`, in large blocks by several threads.

    Past the page cache or through it, whichever is faster.
    """
    return min(_write_files(folder, num_bytes, file_bytes, direct) for direct in (True, False))


def _write_files(folder: Path, num_bytes: int, file_bytes: int, direct: bool) -> float:
    pin = torch.cuda.is_available()
    block = raw_bytes(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pin).random_())
    start = time.perf_counter()
    with ThreadPoolExecutor(NUM_WRITERS) as threads:
        for number, begin in enumerate(range(0, num_bytes, file_bytes)):
            file, size = DirectFile(folder / f"plain-{number}", direct=direct), min(file_bytes, num_bytes - begin)
            writes = [(block[: size - at], at) for at in range(0, size, BLOCK_BYTES)]
            list(threads.map(file.write, *zip(*writes, strict=True)))
            file.flush()
            file.close()
    seconds = time.perf_counter() - start
    for path in folder.glob("plain-*"):
        path.unlink()
    return seconds


def _stock_loop(
    folder: Path,
    wanted: Sequence[PlannedImage],
    images: ImageIndex,
    processor: ImageProcessor,
    stock: Any,
    dtype: torch.dtype,
) -> float:
    """Seconds of a straightforward loop with stock parts; the first image warms up and does not count."""
    from transformers.image_utils import load_image

    start = time.perf_counter()
    for number, image in enumerate([wanted[0], *wanted]):
        if number == 1:
            start = time.perf_counter()
        with Image.open(io.BytesIO(read_bytes(images.path_of[image.key]))) as file:
            inputs = processor.stock(images=[load_image(file)], return_tensors="pt")
        with torch.inference_mode():
            output = stock(
                inputs["pixel_values"].to(stock.device, dtype),
                grid_thw=inputs["image_grid_thw"].to(stock.device),
                return_dict=True,
            )
        levels = [output.pooler_output, *getattr(output, "deepstack_features", ())]
        save_file({"features": torch.stack(levels, dim=1).cpu()}, folder / f"{image.key}.safetensors")
    return time.perf_counter() - start
