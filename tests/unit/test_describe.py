"""`cache plan` and `cache status`: numbers that come true, before, during and after a build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lookonce.cache.build import build_cache, make_plan
from lookonce.cache.describe import PlanReport, StatusReport, describe_plan, describe_status
from lookonce.cache.fingerprint import Fingerprint
from lookonce.cache.pixels import ImageProcessor
from lookonce.cache.read import VisionCache
from lookonce.datasets.images import image_key
from lookonce.train.inputs import Inputs

FINGERPRINT = Fingerprint(1, "0" * 64, {"out_hidden_size": 8}, {}, 4, "float32")
BYTES_PER_TOKEN = 4 * 8 * 4
SIZES = [(64, 64), (64, 96), (96, 96), (160, 160), (40, 400), (1000, 700)]
NUM_TOKENS = [4, 6, 9, 25, 12, 20]
LIMIT = 3
"""Images after which the interrupted build dies; a shard holds one."""


class FakeTower:
    """Gives a piece of its pixels for features and dies after `limit` images."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit

    def encode(self, patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        if self.limit == 0:
            raise KeyboardInterrupt
        self.limit = self.limit and self.limit - 1
        return [patches.view(-1, 4, patches.shape[1])[..., :8]]


class Site:
    """Images and the cache they go into."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.processor, self.root = ImageProcessor(model), folder / "caches"
        self.folder = self.root / FINGERPRINT.folder_name
        self.images = {}
        for number, (width, height) in enumerate(SIZES):
            path = folder / f"{number}.png"
            pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
            self.images[image_key(path)] = path

    def add(self, path: Path) -> None:
        self.images[image_key(path)] = path

    def plan(self) -> PlanReport:
        plan = make_plan(self.folder, FINGERPRINT, self.processor, self.images, shard_bytes=1)
        return describe_plan(
            self.folder, plan, FINGERPRINT, self.processor, self.images, num_files=len(self.images) + 1
        )

    def status(self) -> StatusReport:
        return describe_status(self.folder, self.images)

    def build(self, load_tower: Callable[[], FakeTower] = FakeTower) -> None:
        build_cache(self.root, FINGERPRINT, self.processor, self.images, load_tower, 1, {})

    def build_some(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.build(lambda: FakeTower(LIMIT))


@pytest.fixture
def site(sample: Path, tmp_path: Path) -> Site:
    return Site(sample / "model", tmp_path)


def test_before_a_build_the_plan_is_all_there_is_to_do(site):
    report = site.plan()
    assert (report.num_files, report.num_images, report.num_done, report.num_new_shards) == (7, 6, 0, 6)
    assert (report.mean_tokens, report.max_tokens) == (sum(NUM_TOKENS) / 6, 25)
    assert report.num_bytes == sum(NUM_TOKENS) * BYTES_PER_TOKEN
    assert report.free_bytes > 0
    assert report.folder == site.folder


def test_describing_writes_nothing(site):
    site.plan()
    site.status()
    assert not site.root.exists()


def test_before_a_build_the_status_is_nothing(site):
    assert site.status() == StatusReport(site.folder, 6, 0, 0, 0, 0, 0.0)
    assert "0 of 6 encoded, 6 still to encode" in site.status().text()


def test_during_a_build_the_plan_is_what_is_left(site):
    site.build_some()
    report = site.plan()
    assert (report.num_images, report.num_done, report.num_new_shards) == (6, LIMIT, 6 - LIMIT)
    assert report.num_bytes == sum(NUM_TOKENS) * BYTES_PER_TOKEN


def test_during_a_build_the_status_counts_finished_shards(site):
    site.build_some()
    report = site.status()
    assert (report.num_images, report.num_done, report.num_quarantined, report.num_shards) == (6, LIMIT, 0, LIMIT)
    assert report.num_bytes == sum(path.stat().st_size for path in (site.folder / "shards").iterdir())
    assert report.text().splitlines()[0].split() == "images 3 of 6 encoded, 3 still to encode".split()


def test_after_a_build_nothing_is_left_to_do(site):
    site.build()
    plan, status = site.plan(), site.status()
    assert (plan.num_done, plan.num_new_shards) == (6, 0)
    assert (status.num_done, status.num_shards) == (6, 6)
    assert "6 of 6 encoded, complete" in status.text()


def test_planned_bytes_equal_those_of_the_tensors_made(site):
    planned = site.plan()
    site.build()
    cache = VisionCache.open(site.folder)
    assert planned.num_bytes == sum(cache[key].nbytes for key in site.images)
    assert planned.num_bytes == sum(entry.size_bytes for entry in cache.entries.values())


def test_planned_bytes_of_rotated_images_equal_those_of_the_tensors_made(site, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    for number, size in enumerate([(150, 70), (33, 49), (300, 31)]):
        path = tmp_path / f"rotated-{number}.png"
        Image.new("RGB", size).save(path, exif=exif)
        site.add(path)
    planned = site.plan()
    site.build()
    assert planned.num_bytes == sum(entry.size_bytes for entry in VisionCache.open(site.folder).entries.values())


def test_images_that_can_not_be_encoded_are_planned_as_nothing_and_counted_apart(site, tmp_path):
    (tmp_path / "text.jpg").write_text("no image")
    Image.new("RGB", (1000, 2)).save(tmp_path / "stripe.png")
    before = site.plan()
    site.add(tmp_path / "text.jpg")
    site.add(tmp_path / "stripe.png")
    assert site.plan().num_bytes == before.num_bytes
    site.build()
    status = site.status()
    assert (status.num_images, status.num_done, status.num_quarantined) == (8, 6, 2)
    assert "6 of 8 encoded, complete" in status.text()
    assert site.plan().num_new_shards == 0


def test_status_counts_only_the_images_asked_for(site):
    site.build()
    [key, *_] = site.images
    report = describe_status(site.folder, {key: site.images[key], "f" * 64: Path("absent.jpg")})
    assert (report.num_images, report.num_done) == (2, 1)
    assert "1 of 2 encoded, 1 still to encode" in report.text()


def test_a_plan_of_no_images_is_empty(site):
    site.images = {}
    report = site.plan()
    assert (report.num_images, report.mean_tokens, report.max_tokens, report.num_bytes) == (0, 0, 0, 0)


def test_reports_read_well(site):
    plan = replace(site.plan(), num_files=7000, num_images=6500, num_bytes=1_300_000_000, free_bytes=2 * 10**12)
    assert plan.text().splitlines() == [
        "  images  7,000 files, 6,500 distinct, 0 encoded already",
        "  tokens  13 an image, at most 25",
        "  size    1.3 GB; 2.0 TB free there",
        "  to do   6 shards",
        f"  folder  {site.folder}",
    ]
    status = StatusReport(site.folder, 6500, 6400, 2, 3, 4_200_000_000, 3725.0)
    assert status.text().splitlines() == [
        "  images       6,400 of 6,500 encoded, 98 still to encode",
        "  quarantined  2",
        "  shards       3, 4.2 GB, made in 1 h 2 min",
        f"  folder       {site.folder}",
    ]


def test_a_run_plans_the_bytes_that_its_build_makes(make_run, sample, built):
    planned = Inputs.open(make_run()).describe_plan()
    files = list((sample / "images").iterdir())
    expected = (len(files), len({path.read_bytes() for path in files}), 0)
    assert (planned.num_files, planned.num_images, planned.num_done) == expected
    assert planned.num_bytes == sum(entry.size_bytes for entry in built.entries.values())
    assert len(built) == planned.num_images
