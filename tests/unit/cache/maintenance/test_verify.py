"""Verify: every flipped bit of a shard or receipt is found and traced to its image, and nothing is written."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lookonce.cache.maintenance import verify as module
from lookonce.cache.maintenance.verify import Reading, regions, verify
from lookonce.cache.store.claims import CLAIMS
from lookonce.cache.store.metadata import Receipt, finished_shards, read_receipt, receipt_path, to_text
from lookonce.cache.store.shards import shard_path


def rewrite(folder: Path, name: str, change: Callable[[Receipt], Receipt]) -> None:
    """Replace a receipt by a changed one that has a valid checksum."""
    receipt_path(folder, name).write_text(to_text(change(read_receipt(folder, name))))


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.fixture
def folder(folder_with_quarantine) -> Path:
    return folder_with_quarantine


@pytest.mark.parametrize("level", ["quick", "full"])
def test_an_intact_cache_has_no_problems_and_is_not_written_to(folder, level):
    before = state(folder)
    report = verify(folder, level)
    assert (report.problems, report.unfinished, report.index) == ([], [], "current")
    assert (report.num_shards, report.num_images) == (len(finished_shards(folder)), 8)
    sizes = [path.stat().st_size for path in (folder / "shards").iterdir()]
    assert report.size_bytes == sum(sizes)
    assert report.read_bytes == sum(sizes) if level == "full" else 0 < report.read_bytes < sum(sizes)
    assert state(folder) == before
    json.dumps(asdict(report), default=str)


@pytest.mark.guarantee("Every flipped byte of a shard is found and named.")
def test_quick_finds_every_flipped_bit_of_a_header(folder, flip, found):
    [name, *_] = finished_shards(folder)
    size = read_receipt(folder, name).header_bytes
    for at in (0, 7, 8, *random.Random(0).sample(range(size), 20), size - 1):
        flip(shard_path(folder, name), at)
        assert found(verify(folder, "quick")) == [(name, "", "header")]
        flip(shard_path(folder, name), at)


@pytest.mark.guarantee("Every flipped byte of a shard is found and named.")
@pytest.mark.parametrize("level", ["quick", "full"])
def test_every_flipped_bit_of_a_receipt_is_found(folder, level, flip, found):
    [name, *_] = finished_shards(folder)
    path = receipt_path(folder, name)
    for at in random.Random(0).sample(range(path.stat().st_size), 40):
        flip(path, at, at % 8)
        assert found(verify(folder, level)) == [(name, "", "receipt")]
        flip(path, at, at % 8)


def lose(path: Path) -> None:
    path.unlink()


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


def zero_the_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000] + bytes(5000))


def swap(path: Path) -> None:
    path.write_bytes(path.with_name("shard-00000.safetensors").read_bytes())


@pytest.mark.parametrize(
    ("damage", "quick", "full"),
    [
        (lose, {"shard"}, {"shard"}),
        (cut_short, {"shard"}, {"shard", "image"}),
        (lengthen, {"shard"}, {"shard"}),
        (zero_the_end, set(), {"image"}),
        (swap, {"shard", "header"}, {"shard", "header", "image"}),
    ],
)
def test_a_lost_cut_lengthened_zeroed_or_swapped_shard_is_found(folder, damage, quick, full, found):
    damage(shard_path(folder, "shard-00001"))
    for level, parts in (("quick", quick), ("full", full)):
        report = verify(folder, level)
        assert {part for *_, part in found(report)} == parts
        assert report.damaged == (["shard-00001"] if parts else [])


def test_all_problems_are_reported_at_once(folder, flip, found):
    [first, second, third, *_] = finished_shards(folder)
    for region in regions(read_receipt(folder, first))[1:]:
        flip(shard_path(folder, first), region.offset)
    shard_path(folder, second).unlink()
    receipt_path(folder, third).write_text("{")
    report = verify(folder)
    images = [("image", key) for key in sorted(read_receipt(folder, first).images)]
    assert sorted((part, key) for shard, key, part in found(report) if shard == first) == images
    assert {(shard, part) for shard, _, part in found(report)} == {
        *((first, "image"), (second, "shard"), (third, "receipt"))
    }
    assert "lookonce cache repair RUN.yaml" in report.text()
    assert all(problem.text() in report.text() for problem in report.problems)


def moved(receipt: Receipt, by: int) -> Receipt:
    """The receipt with another offset of the last image."""
    key, entry = max(receipt.images.items(), key=lambda item: item[1].offset)
    return replace(receipt, images=receipt.images | {key: replace(entry, offset=entry.offset + by)})


def without_an_image(receipt: Receipt) -> Receipt:
    return replace(receipt, images=dict(list(receipt.images.items())[1:]))


def with_another_grid(receipt: Receipt) -> Receipt:
    key, entry = next(iter(receipt.images.items()))
    return replace(receipt, images=receipt.images | {key: replace(entry, grid_thw=(1, 2, 2))})


def with_other_tokens(receipt: Receipt) -> Receipt:
    key, entry = next(iter(receipt.images.items()))
    return replace(receipt, images=receipt.images | {key: replace(entry, num_tokens=entry.num_tokens - 1)})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda receipt: moved(receipt, 4096), "leave a gap"),
        (lambda receipt: moved(receipt, -4096), "overlap"),
        (without_an_image, "leave a gap"),
        (with_another_grid, "different patch grids"),
        (with_other_tokens, "the header says"),
        (lambda receipt: replace(receipt, fingerprint="1" * 64), "belongs to another cache"),
    ],
)
def test_a_valid_receipt_that_does_not_match_its_shard_is_found(folder, change, what):
    rewrite(folder, "shard-00000", change)
    report = verify(folder)
    assert report.damaged == ["shard-00000"]
    assert any(what in problem.what for problem in report.problems)


def test_a_read_error_is_a_problem_like_others(folder, monkeypatch):
    name = "shard-00001"
    regions_ = regions(read_receipt(folder, name))
    pread = os.pread

    def fail(descriptor: int, num_bytes: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == inode and offset == regions_[1].offset:
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, num_bytes, offset)

    inode = shard_path(folder, name).stat().st_ino
    monkeypatch.setattr(os, "pread", fail)
    [problem] = verify(folder).problems
    assert (problem.shard, problem.image) == (name, regions_[1].key) and "Input/output error" in problem.what


def test_after_a_failure_the_other_threads_end_at_their_next_block():
    ended = threading.Barrier(2)
    reading = Reading("read", None)

    def read(number: int) -> None:
        ended.wait()
        if number == 0:
            raise ZeroDivisionError
        while True:
            reading.count(memoryview(b""))

    with pytest.raises(ZeroDivisionError):
        list(reading.map(read, range(2)))


def test_the_text_shows_the_first_problems_and_the_report_has_all(folder, monkeypatch):
    monkeypatch.setattr(module, "NUM_NAMED", 2)
    for name in finished_shards(folder):
        shard_path(folder, name).unlink()
    report = verify(folder)
    assert len(report.problems) == report.num_shards > 2
    assert f"and {report.num_shards - 2} more" in report.text()


def test_a_cache_without_images_is_intact(site, tmp_path):
    (site.path / "bad.png").write_text("no image")
    site.build(site.index(site.path / "bad.png"))
    report = verify(site.folder())
    assert (report.problems, report.num_images, report.num_shards) == ([], 0, 1)


def test_verifying_does_not_touch_claims(folder):
    (folder / CLAIMS).mkdir(exist_ok=True)
    claim = folder / CLAIMS / "shard-00005.json"
    claim.write_text("{}")
    verify(folder)
    assert claim.exists() and time.time() - claim.stat().st_mtime < 60


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_scales_and_features_of_every_dtype_have_checksums(site, images, dtype, flip, found):
    compute = site.use(dtype)
    site.build(images, lambda: site.Tower(dtype=compute))
    folder = site.folder()
    assert verify(folder).problems == []
    path = shard_path(folder, "shard-00000")
    last = regions(read_receipt(folder, "shard-00000"))[-1]
    flip(path)
    assert found(verify(folder)) == [("shard-00000", last.key, "image")]
