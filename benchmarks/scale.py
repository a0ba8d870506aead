"""Measure a cache of millions of images: sizes, times and memory of plan, receipts and index.

    python benchmarks/scale.py --images 1000000

Receipts, plan and index are real, shards are sparse files of the right size. Each figure is measured in a fresh process
with a warm page cache; memory excludes the imports. Takes some minutes and 0.6 kB of disk space an image.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import (
    RECEIPTS,
    Entry,
    PlannedImage,
    Receipt,
    ensure_manifest,
    extend_plan,
    finished_shards,
    read_plan,
    receipt_path,
    shard_name,
    to_text,
)
from lookonce.cache.store.reader import INDEX, VisionCache, write_index
from lookonce.cache.store.shards import SHARDS, shard_path

IMAGES_PER_SHARD, NUM_TOKENS, HEADER_BYTES = 50, 1_280, 20_480
STAMP = (123_456, 1_763_712_345_123_456_789)
NUM_LOOKUPS = 100_000
FINGERPRINT = Fingerprint(2, "0" * 64, {"out_hidden_size": 4096}, {}, 4, "bfloat16")
IMAGE_BYTES = NUM_TOKENS * FINGERPRINT.bytes_per_token
Task = Callable[[], object]


def key_of(number: int) -> str:
    return sha256(str(number).encode()).hexdigest()


def write_receipts(folder: Path, num_images: int) -> None:
    """Write receipts, and empty shard files of the sizes that they state."""
    (folder / RECEIPTS).mkdir()
    (folder / SHARDS).mkdir()
    levels = (1.234, 2.345, 3.456, 4.567)
    for shard, first in enumerate(range(0, num_images, IMAGES_PER_SHARD)):
        keys = sorted(key_of(number) for number in range(first, min(first + IMAGES_PER_SHARD, num_images)))
        offsets = {key: HEADER_BYTES + row * IMAGE_BYTES for row, key in enumerate(keys)}
        images = {
            key: Entry(offset, IMAGE_BYTES, NUM_TOKENS, (1, 64, 80), key[:16], levels, levels)
            for key, offset in offsets.items()
        }
        size = HEADER_BYTES + len(keys) * IMAGE_BYTES
        name = shard_name(shard)
        receipt = Receipt(name, FINGERPRINT.sha256, size, HEADER_BYTES, "0" * 16, "node-1", 1.7e9, 12.5, images)
        receipt_path(folder, name).write_text(to_text(receipt))
        shard_path(folder, name).touch()
        os.truncate(shard_path(folder, name), size)


def write_plan(folder: Path, num_images: int) -> Task:
    """Write the plan in two parts: nine tenths of the images, then the rest."""
    files = (f"/data/kvasir/images/frame-{number:08d}.jpg" for number in range(num_images))
    images = [PlannedImage(key_of(number), NUM_TOKENS, (file,), (STAMP,)) for number, file in enumerate(files)]
    first = num_images // 10 * 9

    def write() -> None:
        for part in (images[:first], images[first:]):
            plan = read_plan(folder)
            new = plan.extension(part, FINGERPRINT.bytes_per_token, IMAGES_PER_SHARD * IMAGE_BYTES)
            assert extend_plan(folder, plan, new)

    return write


def look_up(folder: Path, num_images: int, ask: Callable[[VisionCache, str], object]) -> Task:
    cache, numbers = VisionCache.open(folder), random.Random(0)
    keys = [key_of(numbers.randrange(num_images)) for _ in range(NUM_LOOKUPS)]
    return lambda: [ask(cache, key) for key in keys]


MEASURES: dict[str, Callable[[Path, int], Task]] = {
    "write the plan": write_plan,
    "read the plan": lambda folder, _: lambda: read_plan(folder),
    "list finished shards": lambda folder, _: lambda: finished_shards(folder),
    "open without index": lambda folder, _: lambda: VisionCache.open(folder),
    "write the index": lambda folder, _: lambda: write_index(folder, FINGERPRINT.sha256),
    "open with index": lambda folder, _: lambda: VisionCache.open(folder),
    f"{NUM_LOOKUPS:,} x cache.entry(key)": lambda *arguments: look_up(*arguments, VisionCache.entry),
    f"{NUM_LOOKUPS:,} x key in cache": lambda *arguments: look_up(*arguments, VisionCache.__contains__),
}


def memory_bytes(name: str) -> int:
    """The process's resident memory: VmRSS is the current value, VmHWM the peak."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def measure(name: str, folder: Path, num_images: int) -> dict[str, Any]:
    task = MEASURES[name](folder, num_images)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = memory_bytes("VmRSS"), time.perf_counter()
    result = task()
    seconds = time.perf_counter() - start
    kept, peak = memory_bytes("VmRSS") - before, memory_bytes("VmHWM") - before
    del result
    return {"seconds": seconds, "kept_mb": kept / 1e6, "peak_mb": peak / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_000_000, metavar="N")
    parser.add_argument(
        "--folder", type=Path, help="build the cache in this folder; removed afterwards (default: temporary)"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder, options.images)))
        return
    folder = Path(tempfile.mkdtemp(prefix="scale-", dir=options.folder))
    try:
        start = time.perf_counter()
        ensure_manifest(folder, FINGERPRINT, {})
        write_receipts(folder, options.images)
        num_shards = len(finished_shards(folder))
        print(f"{options.images:,} images in {num_shards:,} shards, built in {time.perf_counter() - start:.0f} s")
        print(f"{'':32}{'seconds':>10}{'MB kept':>10}{'MB at most':>12}")
        for name in MEASURES:
            command = [sys.executable, __file__, "--images", str(options.images), "--folder", folder, "--measure", name]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            print(f"{name:32}{found['seconds']:10.3f}{found['kept_mb']:10.1f}{found['peak_mb']:12.1f}", flush=True)
        for name, pattern in {"plan": "plan*.json", "receipts": f"{RECEIPTS}/*", "index": INDEX}.items():
            num_bytes = sum(path.stat().st_size for path in folder.glob(pattern))
            print(f"{name + ', bytes an image':32}{num_bytes / options.images:10.1f}")
        for name in ("", RECEIPTS, SHARDS):
            print(f"{'files in ' + (name or 'the folder'):32}{len(os.listdir(folder / name)):10,}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
