"""`cache plan`: the estimate is right before, during and after a build, and the pilot leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lookonce.cache.build import estimate as module
from lookonce.cache.build.estimate import Estimate, Pilot, estimate
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import ImageIndex
from lookonce.disk_space import check_room, with_margin
from lookonce.errors import DiskFull
from lookonce.run.open import TO_BUILD, open_run

SIZES = [(64, 64), (64, 96), (96, 96), (160, 160), (40, 400), (1000, 700)]
NUM_TOKENS = [4, 6, 9, 25, 12, 20]
Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def images(site) -> ImageIndex:
    return site.index(*(site.noise(f"{n}.png", n, (height, width)) for n, (width, height) in enumerate(SIZES)))


def make_estimate(
    site, images: ImageIndex, epoch=(), load_tower=None, num_pilot: int = 0, shard_bytes: int = 1
) -> Estimate:
    return estimate(site.folder(), site.fingerprint, site.processor, images, shard_bytes, epoch, load_tower, num_pilot)


def mtimes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_before_a_build_everything_is_missing_and_nothing_is_written(site, images):
    before = mtimes(site.path)
    report = make_estimate(site, images)
    assert mtimes(site.path) == before
    bytes_per_token = site.fingerprint.bytes_per_token
    assert (report.num_files, report.num_images, report.num_done, report.num_new_shards) == (6, 6, 0, 6)
    assert (report.num_tokens, report.max_tokens) == (sum(NUM_TOKENS), 25)
    assert report.mean_tokens == sum(NUM_TOKENS) / 6
    assert report.num_bytes == report.missing_bytes == sum(NUM_TOKENS) * bytes_per_token
    assert report.bytes_by_dtype == {
        "bfloat16": sum(NUM_TOKENS) * 4 * 1536 * 2,
        "fp8_e4m3": sum(NUM_TOKENS) * 4 * (1536 + 4),
    }
    assert report.free_bytes > 0 and report.folder == site.folder()
    assert (report.pilot, report.build_seconds, report.break_even_epochs) == (None, None, None)


def test_estimated_bytes_are_those_of_the_features_also_for_rotated_images(site, images):
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = [site.path / f"rotated-{number}.png" for number in range(3)]
    for path, size in zip(rotated, [(150, 70), (33, 49), (300, 31)], strict=True):
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path, exif=exif)
    images = site.index(*images.key_of, *rotated)
    planned = make_estimate(site, images)
    site.build(images)
    assert planned.num_bytes == sum(len(content) for content in site.stored().values())


def test_images_that_cannot_be_encoded_need_no_bytes(site, images):
    before = make_estimate(site, images)
    (site.path / "text.jpg").write_text("no image")
    Image.new("RGB", (1000, 2)).save(site.path / "stripe.png")
    more = site.index(*images.key_of, *(site.path / name for name in ("text.jpg", "stripe.png", "absent.jpg")))
    report = make_estimate(site, more)
    assert (report.num_files, report.num_images, report.num_unusable) == (9, 8, 1)
    assert (report.num_bytes, report.max_tokens) == (before.num_bytes, before.max_tokens)
    site.build(more)
    assert (make_estimate(site, more).num_new_shards, make_estimate(site, more).num_done) == (0, 8)


def test_an_epoch_reads_an_image_for_each_question(site, images):
    [first, second, *_] = images.path_of
    tokens = {images.key_of[site.path / f"{n}.png"]: number for n, number in enumerate(NUM_TOKENS)}
    report = make_estimate(site, images, [first, first, first, second, "unknown"])
    assert report.epoch_bytes == (3 * tokens[first] + tokens[second]) * site.fingerprint.bytes_per_token


def test_a_pilot_encodes_some_images_of_all_sizes_and_leaves_nothing_behind(site, images):
    tower, before = site.Tower(), mtimes(site.path)
    report = make_estimate(site, images, list(images.path_of) * 2, lambda: tower, num_pilot=3)
    assert mtimes(site.path) == before
    assert sum(tower.tokens, []) == [6, 12, 25] * 2  # the first time warms up
    assert report.pilot and (report.pilot.num_images, report.pilot.num_tokens) == (3, 43)
    assert 0 < report.pilot.tower_seconds < report.pilot.seconds


def test_a_pilot_whose_images_cannot_be_encoded_gives_no_times(site):
    [path] = site.index(site.noise("white.png", 0)).path_of.values()
    Image.new("RGB", (64, 64), "white").save(path)
    report = make_estimate(site, site.index(path), load_tower=site.Tower, num_pilot=3)
    assert (report.pilot, report.build_seconds, report.break_even_epochs) == (None, None, None)


def test_times_are_those_of_the_pilot_scaled_by_tokens(site, images, monkeypatch):
    monkeypatch.setattr(module, "run_pilot", lambda *_: Pilot(2, num_tokens=20, seconds=10.0, tower_seconds=4.0))
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(4), shard_bytes=1)
    done = VisionCache.open(site.folder())
    num_left = sum(NUM_TOKENS) - sum(done.entry(key)[1].num_tokens for key in done.keys())  # noqa: SIM118
    questions = list(images.path_of) * 5
    report = make_estimate(site, images, questions, site.Tower, num_pilot=2)
    assert report.build_seconds == num_left * 10.0 / 20
    # Encoding all once takes 0.5 s a token, running the tower for all 5 questions an image 0.2 s a token and question.
    assert report.break_even_epochs == pytest.approx(0.5 / (5 * 0.2))
    assert make_estimate(site, images, [], site.Tower, num_pilot=2).break_even_epochs is None


def test_not_enough_is_printed_exactly_when_a_build_would_refuse(site, images, monkeypatch):
    report = make_estimate(site, images)
    needed = with_margin(report.missing_bytes)
    for free_bytes, verdict in ((needed - 1, "free on the disk: NOT ENOUGH"), (needed, "free on the disk")):
        assert replace(report, free_bytes=free_bytes).text().splitlines()[3].endswith(verdict)
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free_bytes: Usage(10**13, 0, free))
        with contextlib.nullcontext() if free_bytes == needed else pytest.raises(DiskFull):
            check_room(site.folder(), report.missing_bytes)
    assert replace(report, missing_bytes=0, free_bytes=0).text().splitlines()[3].endswith("0 B free on the disk")


def test_the_estimate_of_a_run_has_the_bytes_of_its_build(make_run, sample, built):
    planned = open_run(make_run(), TO_BUILD).estimate(2)
    files = list((sample / "images").iterdir())
    assert (planned.num_files, planned.num_images) == (len(files), len({path.read_bytes() for path in files}))
    assert planned.num_bytes == planned.missing_bytes
    assert planned.num_bytes == sum(built.entry(key)[1].size_bytes for key in built.keys())  # noqa: SIM118
    assert planned.pilot and planned.pilot.num_images == 2
    assert planned.build_seconds and planned.break_even_epochs
    assert planned.epoch_bytes > planned.num_bytes / 2
