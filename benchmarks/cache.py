"""How fast a cache is built and read, beside what limits both.

    python benchmarks/cache.py build data/sample/run.yaml --images 500 --set cache.dir=/scratch
    python benchmarks/cache.py read caches/1f2e3d4c5b6a7980 --images 2000

Building writes five times the size of these images' cache into `cache.dir`, and removes it.

Design: of building are measured together, over the same images: the tower alone on patches that are already on the GPU,
the disk alone, the build from end to end (JPEG decoding to fsync), and a stock loop (stock processor, stock tower,
safetensors, one image at a time). The build cannot be faster than the slower of the first two, so its share of that
limit is the main result. The disk is measured before and after the build and averaged, because disks are not steady.
The build is warmed up with a few tower batches. Its phases are busy seconds of all threads or of the GPU; they overlap,
so their sum exceeds the elapsed time.

The same files are read twice: in order in large blocks, which is the disk's speed, and image by image in random order
through `VisionCache.get_many`, with checksums. Before each, the kernel is asked to drop the files from the page cache
(`posix_fadvise`, which needs no privileges; it has no effect on a file system in memory).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from lookonce.bench.step import matmul_flops_per_second, synchronize
from lookonce.cache.build.progress import planned_images
from lookonce.cache.build.worker import BuildOptions, build_cache
from lookonce.cache.format import BUILD_COMMAND
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cache.store.fingerprint import Fingerprint, raw_bytes
from lookonce.cache.store.metadata import PlannedImage, cut
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import NUM_WRITERS, DirectFile, shard_path
from lookonce.datasets.images import ImageIndex, decode, read_bytes
from lookonce.disk_space import existing
from lookonce.errors import FeaturesMissing, ImageError, UsageError
from lookonce.files import NUM_THREADS, scratch_folder
from lookonce.run.config import read_run_file
from lookonce.run.open import TO_BUILD, open_run
from lookonce.text import count, rows, size, table

BLOCK_BYTES = 1 << 24
"""Size of a write or a read of the disk alone: large enough for any disk."""
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
        warm_up = first(images, _num_warm_up(wanted, tower))  # allocating pinned memory is slow the first time
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
        tower_flop=sum(flop_of(tower, image.num_tokens) for image in wanted),
        matmul_flops=matmul_flops_per_second(tower.device, tower.dtype),
        phases=report.phases,
    )


def flop_of(tower: Tower, num_tokens: int) -> float:
    """FLOPs of a tower for an image of `num_tokens` tokens: matrix products and attention, two per multiply-add.

    Attention counts as if each patch attended to its whole image, also in blocks with windows.
    """
    num_patches, parameters = num_tokens * tower.merge_size**2, tower.module.named_parameters()
    weights = [(name, weight.numel()) for name, weight in parameters if weight.ndim > 1 and "pos_embed" not in name]
    of_token = sum(number for name, number in weights if "merger" in name)
    of_patch = sum(number for _, number in weights) - of_token
    attention = tower.config.depth * 2 * num_patches * len(tower.module.patch_embed.proj.weight)
    return float(2 * (num_patches * (of_patch + attention) + num_tokens * of_token))


def _resized(processor: ImageProcessor, path: Path) -> torch.Tensor:
    return processor.resized(decode(read_bytes(path), path), path)


def _is_sound(image: PlannedImage, images: ImageIndex, processor: ImageProcessor) -> bool:
    """Whether an image can be decoded; reading it also brings it into the page cache, for all measurements alike."""
    with contextlib.suppress(ImageError):
        _resized(processor, images.path_of[image.key])
        return image.num_tokens > 0
    return False


def first(images: ImageIndex, number: int) -> ImageIndex:
    """The first `number` distinct images."""
    path_of = dict(list(images.path_of.items())[:number])
    key_of = {path: key for path, key in images.key_of.items() if key in path_of}
    return ImageIndex(key_of, path_of, {key: size for key, size in images.size_of.items() if key in path_of})


def _num_warm_up(wanted: Sequence[PlannedImage], tower: Tower) -> int:
    """Number of images that make some tower batches."""
    mean = sum(image.num_tokens for image in wanted) / len(wanted)
    return max(round(WARM_UP_BATCHES * tower.tokens_per_tower_batch / mean), 1)


def _tower_alone(wanted: Sequence[PlannedImage], images: ImageIndex, processor: ImageProcessor, tower: Tower) -> float:
    """Seconds of the tower for all images, in the tower batches of a build; the second of two rounds."""
    patcher = processor.patcher().to(tower.device, tower.dtype)
    batches = []
    for batch in cut(sorted(wanted, key=lambda image: (image.num_tokens, image.key)), tower.tokens_per_tower_batch):
        pixels = [_resized(processor, images.path_of[image.key]).to(tower.device) for image in batch]
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


IMAGES_PER_CALL = 32


@dataclass(frozen=True)
class ReadBench:
    """What was measured."""

    num_images: int
    num_bytes: int
    """Bytes of features that were read in random order."""
    sequential_bytes: int
    sequential_seconds: float
    random_seconds: float
    open_seconds: float

    @property
    def share(self) -> float:
        """The rate of random reads divided by that of sequential reads."""
        return (self.num_bytes / self.random_seconds) / (self.sequential_bytes / self.sequential_seconds)

    def text(self) -> str:
        measured = (
            ("files in order, in large blocks", self.sequential_bytes, self.sequential_seconds),
            ("images in random order, checked", self.num_bytes, self.random_seconds),
        )
        lines = [(name, f"{number / seconds / 1e9:.2f}", f"{seconds:.2f}") for name, number, seconds in measured]
        facts = [
            ("read", f"{count(self.num_images, 'image')}, {size(self.num_bytes)}, with {NUM_THREADS} threads"),
            ("random", f"{self.share:.0%} of the sequential rate; files were dropped from the page cache before each"),
            ("opening", f"{self.open_seconds * 1000:.0f} ms"),
        ]
        return "\n\n".join([table(("", "GB/s", "seconds"), lines), rows(facts)])


def bench_read(folder: Path, num_images: int, *, seed: int = 0) -> ReadBench:
    """Read some images in random order, and their shards in order.

    Raises:
        CacheError: the cache cannot be opened or is damaged.
    """
    start = time.perf_counter()
    cache = VisionCache.open(folder)
    open_seconds = time.perf_counter() - start
    keys = list(cache.keys())
    if not keys:
        raise FeaturesMissing(f"{folder} holds no features to read; encode some with: {BUILD_COMMAND}")
    random.Random(seed).shuffle(keys)
    keys = keys[:num_images]
    entries = [cache.entry(key) for key in keys]
    files = [shard_path(folder, shard) for shard in sorted({shard for shard, _ in entries})]
    cache.get_many(keys[:IMAGES_PER_CALL], pin=True)  # allocating pinned memory is slow the first time
    _drop_from_page_cache(files)
    sequential_seconds = _read_in_order(files)
    _drop_from_page_cache(files)
    start = time.perf_counter()
    for begin in range(0, len(keys), IMAGES_PER_CALL):
        cache.get_many(keys[begin : begin + IMAGES_PER_CALL], pin=True)
    random_seconds = time.perf_counter() - start
    return ReadBench(
        num_images=len(keys),
        num_bytes=sum(entry.size_bytes for _, entry in entries),
        sequential_bytes=sum(path.stat().st_size for path in files),
        sequential_seconds=sequential_seconds,
        random_seconds=random_seconds,
        open_seconds=open_seconds,
    )


def _read_in_order(files: list[Path]) -> float:
    """Seconds to read whole files, block after block, each file by one thread."""
    pin = torch.cuda.is_available()
    buffers = [raw_bytes(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=pin)) for _ in files[:NUM_THREADS]]

    def read(path: Path) -> None:
        buffer = buffers.pop()
        descriptor = os.open(path, os.O_RDONLY)
        offset = 0
        while num_read := os.preadv(descriptor, [buffer], offset):
            offset += num_read
        os.close(descriptor)
        buffers.append(buffer)

    start = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(read, files))
    return time.perf_counter() - start


def _drop_from_page_cache(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    build, read = commands.add_parser("build"), commands.add_parser("read")
    build.add_argument("run_file", type=Path)
    build.add_argument("--images", type=int, help="by default all of the run's")
    build.add_argument("--plain", type=int, default=32, help="images for the stock loop")
    build.add_argument("--set", action="append", default=[], dest="assignments")
    read.add_argument("cache", type=Path)
    read.add_argument("--images", type=int, default=512)
    given = parser.parse_args()
    if given.command == "read":
        found = bench_read(given.cache, given.images)
        print(found.text(), json.dumps(asdict(found)), sep="\n")
        return
    opened = open_run(read_run_file(given.run_file, given.assignments), TO_BUILD)
    images = first(opened.images, given.images) if given.images else opened.images
    report = bench_cache(
        opened.run.cache.dir,
        opened.fingerprint,
        opened.processor,
        images,
        opened.load_tower(),
        lambda: opened.load_tower(fast=False).module,
        opened.shard_bytes,
        given.plain,
    )
    print(report.text(), json.dumps(report.to_json()), sep="\n")


if __name__ == "__main__":
    main()
