"""How fast a cache is made, beside what limits it: the measurements behind `lookonce bench cache`.

In one run, over the same images: the tower alone on patches that are on the GPU already, the disk alone, the engine
from end to end (JPEG decoding to fsync), and the plain loop (stock processor, stock tower, safetensors, one image at a
time). The engine can be no faster than the slower of the first two, and how close it comes is the figure that counts.
The disk is measured before and after the engine, and the mean taken: disks are not steady. The engine is warmed up with
a few forwards. Phases are busy seconds of all threads or of the GPU; they overlap, so they add up to more than the time
that passed.
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

from lookonce.cache.build.planner import planned_images
from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.direct_io import DirectFile
from lookonce.cache.store.fingerprint import Fingerprint, raw_bytes
from lookonce.cache.store.plan import PlannedImage, cut
from lookonce.cache.store.shards import NUM_WRITERS
from lookonce.datasets.images import ImageIndex, read_bytes
from lookonce.disk_space import existing
from lookonce.errors import ImageError, UsageError
from lookonce.files import scratch_folder
from lookonce.text import rows, table

BLOCK_BYTES = 1 << 24
"""Of a plain write or read: large enough for any disk."""
MATMUL_SIZE = 8192
WARM_UP_FORWARDS = 6


@dataclass(frozen=True)
class CacheBench:
    """What was measured, all over the same images but for the plain loop, which got the first `num_plain`."""

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
        """What the tower alone or the disk alone needs, whichever is slower."""
        return max(self.tower_seconds, self.disk_seconds)

    @property
    def share_of_limit(self) -> float:
        return self.limit_seconds / self.engine_seconds

    @property
    def speedup(self) -> float:
        """Over the plain loop."""
        return self.plain_seconds / self.num_plain / (self.engine_seconds / self.num_images)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"share_of_limit": self.share_of_limit, "speedup": self.speedup}

    def text(self) -> str:
        ways = (
            ("tower alone, patches on the device", self.num_images, self.tower_seconds),
            ("disk alone, the same bytes", self.num_images, self.disk_seconds),
            ("engine, from files to files", self.num_images, self.engine_seconds),
            ("plain loop, image by image", self.num_plain, self.plain_seconds),
        )
        per_image = self.num_bytes / self.num_images
        lines = [
            (name, f"{number / seconds:.1f}", f"{number / seconds * per_image / 1e9:.2f}", f"{seconds:.2f}")
            for name, number, seconds in ways
        ]
        achieved = self.tower_flop / self.tower_seconds
        facts = [
            ("images", f"{self.num_images:,}, {self.num_tokens / self.num_images:.0f} tokens each, {self.device}"),
            ("engine", f"{self.share_of_limit:.0%} of what limits it, {self.speedup:.1f} times the plain loop"),
            ("tower", f"{achieved / 1e12:.0f} TFLOP/s, {achieved / self.matmul_flops:.0%} of the measured matrix rate"),
        ]
        phases = [(name, f"{seconds:.2f}") for name, seconds in sorted(self.phases.items(), key=lambda item: -item[1])]
        return "\n\n".join(
            [
                table(("", "images/s", "GB/s", "seconds"), lines),
                rows(facts),
                table(("engine's phases (overlapping)", "seconds"), phases),
            ]
        )


def bench_cache(
    place: Path,
    fingerprint: Fingerprint,
    processor: ImageProcessor,
    images: ImageIndex,
    tower: Tower,
    load_stock: Callable[[], Any],
    shard_bytes: int,
    num_plain: int,
) -> CacheBench:
    """Measure all four ways over `images`, writing below `place` and removing what was written.

    `load_stock` gives transformers' own tower, for the plain loop.
    """
    wanted = [image for image in planned_images(images, processor) if _is_sound(image, images, processor)]
    if not wanted:
        raise UsageError("there is no image to measure with; name a run file whose records have images")
    num_tokens = sum(image.num_tokens for image in wanted)
    tower_seconds = _tower_alone(wanted, images, processor, tower)
    num_bytes, options = num_tokens * fingerprint.bytes_per_token, BuildOptions(shard_bytes)
    with scratch_folder(existing(place), "bench") as folder:
        warm_up = images.first(_num_warm_up(wanted, tower))  # page-locked memory is slow to get the first time
        build_cache(folder, fingerprint, processor, warm_up, lambda: tower, options)
    with scratch_folder(existing(place), "bench") as folder:
        before = disk_alone(folder, num_bytes, shard_bytes)
        start = time.perf_counter()
        report = build_cache(folder, fingerprint, processor, images, lambda: tower, options)
        engine_seconds = time.perf_counter() - start
    with scratch_folder(existing(place), "bench") as folder:
        disk_seconds = (before + disk_alone(folder, num_bytes, shard_bytes)) / 2
    with scratch_folder(existing(place), "bench") as folder:
        plain_seconds = _plain_loop(folder, wanted[:num_plain], images, processor, load_stock(), tower.dtype)
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
        matmul_flops=matmul_rate(tower.device, tower.dtype),
        phases=report.phases,
    )


def _is_sound(image: PlannedImage, images: ImageIndex, processor: ImageProcessor) -> bool:
    """Whether an image can be decoded; reading it also brings it into memory, for all ways alike."""
    with contextlib.suppress(ImageError):
        processor.resized_file(images.path_of[image.key])
        return image.num_tokens > 0
    return False


def _num_warm_up(wanted: Sequence[PlannedImage], tower: Tower) -> int:
    """Images for some forwards."""
    mean = sum(image.num_tokens for image in wanted) / len(wanted)
    return max(round(WARM_UP_FORWARDS * tower.tokens_per_forward / mean), 1)


def _tower_alone(wanted: Sequence[PlannedImage], images: ImageIndex, processor: ImageProcessor, tower: Tower) -> float:
    """Seconds for all images, in the engine's own forwards, with nothing else to do; the second of two rounds."""
    patcher = processor.patcher().to(tower.device, tower.dtype)
    forwards = []
    for group in cut(sorted(wanted, key=lambda image: (image.num_tokens, image.key)), tower.tokens_per_forward):
        pixels = [processor.resized_file(images.path_of[image.key]).to(tower.device) for image in group]
        forwards.append((patcher(pixels), [patcher.grid_thw(image) for image in pixels]))
    seconds = 0.0
    for _ in range(2):
        _synchronize(tower.device)
        start = time.perf_counter()
        for patches, grids in forwards:
            tower.encode(patches, grids)
        _synchronize(tower.device)
        seconds = time.perf_counter() - start
    return seconds


def disk_alone(folder: Path, num_bytes: int, file_bytes: int) -> float:
    """Seconds to write so many bytes into files of that size, each flushed, in large blocks by several threads.

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


def _plain_loop(
    folder: Path,
    wanted: Sequence[PlannedImage],
    images: ImageIndex,
    processor: ImageProcessor,
    stock: Any,
    dtype: torch.dtype,
) -> float:
    """Seconds of what anyone would write first; the first image warms up and does not count."""
    start = time.perf_counter()
    for number, image in enumerate([wanted[0], *wanted]):
        if number == 1:
            start = time.perf_counter()
        with Image.open(io.BytesIO(read_bytes(images.path_of[image.key]))) as file:
            inputs = processor.stock(images=[file.convert("RGB")], return_tensors="pt")
        with torch.inference_mode():
            output = stock(
                inputs["pixel_values"].to(stock.device, dtype),
                grid_thw=inputs["image_grid_thw"].to(stock.device),
                return_dict=True,
            )
        levels = [output.pooler_output, *output.deepstack_features]
        save_file({"features": torch.stack(levels, dim=1).cpu()}, folder / f"{image.key}.safetensors")
    return time.perf_counter() - start


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of large matrix products on random data."""
    size = MATMUL_SIZE if device.type == "cuda" else MATMUL_SIZE // 8
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        left @ right
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        left @ right
    _synchronize(device)
    return 10 * 2 * size**3 / (time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
