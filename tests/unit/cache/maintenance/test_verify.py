"""Verify: every flipped bit is found and told to its shard and image, all problems at once, and nothing is written."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lookonce.cache.maintenance import scan as walk
from lookonce.cache.maintenance import verify as module
from lookonce.cache.maintenance.checks import regions
from lookonce.cache.maintenance.verify import VerifyReport, verify
from lookonce.cache.store.claims import CLAIMS
from lookonce.cache.store.manifest import PLAN, extend_plan, plan_path, read_plan
from lookonce.cache.store.plan import PlannedImage, Shard
from lookonce.cache.store.receipts import Receipt, finished_shards, read_receipt, receipt_path, to_text
from lookonce.cache.store.shards import shard_path
from lookonce.errors import CacheError

NUM_FLIPS = 200


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [value] = file.read(1)
        file.seek(at)
        file.write(bytes([value ^ 1 << bit]))


def found(report: VerifyReport) -> list[tuple[str, str, str]]:
    return [(problem.shard, problem.image, problem.part) for problem in report.problems]


def rewrite(folder: Path, name: str, change: Callable[[Receipt], Receipt]) -> None:
    """Put a changed receipt, with the checksum that it needs, in the place of another."""
    receipt_path(folder, name).write_text(to_text(change(read_receipt(folder, name))))


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.fixture
def folder(site, images) -> Path:
    """A cache of several shards, and an image that is in quarantine."""
    (site.path / "bad.png").write_text("no image")
    index = site.index(*images.key_of, site.path / "bad.png")
    site.build(index)
    return site.folder()


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_sound_cache_has_no_problems_and_is_not_written_to(folder, level):
    before = state(folder)
    report = verify(folder, level)
    assert (report.problems, report.unfinished, report.index) == ([], [], "current")
    assert (report.num_shards, report.num_images) == (len(finished_shards(folder)), 8)
    sizes = [path.stat().st_size for path in (folder / "shards").iterdir()]
    assert report.size_bytes == sum(sizes)
    assert report.read_bytes == sum(sizes) if level == "full" else 0 < report.read_bytes < sum(sizes)
    assert state(folder) == before
    json.dumps(asdict(report), default=str)


def test_every_one_of_200_flipped_bits_is_found_and_told_to_its_shard_and_image(folder):
    rng = random.Random(0)
    names = finished_shards(folder)
    places = {name: regions(read_receipt(folder, name)) for name in names}
    seen = set()
    for _ in range(NUM_FLIPS):
        name, bit = rng.choice(names), rng.randrange(8)
        at = rng.randrange(shard_path(folder, name).stat().st_size)
        [region] = [place for place in places[name] if place.offset <= at < place.offset + place.size_bytes]
        flip(shard_path(folder, name), at, bit)
        [problem] = verify(folder).problems
        assert (problem.shard, problem.image) == (name, region.key)
        assert problem.part == "image" if region.key else "header" in problem.what
        assert bool(problem.file) == bool(region.key)
        flip(shard_path(folder, name), at, bit)
        seen.add((name, region.key))
    assert verify(folder).problems == []
    assert {name for name, _ in seen} == set(names) and any(not key for _, key in seen)


def test_quick_finds_every_flipped_bit_of_a_header(folder):
    [name, *_] = finished_shards(folder)
    size = read_receipt(folder, name).header_bytes
    for at in (0, 7, 8, *random.Random(0).sample(range(size), 20), size - 1):
        flip(shard_path(folder, name), at)
        assert found(verify(folder, "quick")) == [(name, "", "header")]
        flip(shard_path(folder, name), at)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_every_flipped_bit_of_a_receipt_is_found(folder, level):
    [name, *_] = finished_shards(folder)
    path = receipt_path(folder, name)
    for at in random.Random(0).sample(range(path.stat().st_size), 40):
        flip(path, at, at % 8)
        assert found(verify(folder, level)) == [(name, "", "receipt")]
        flip(path, at, at % 8)


@pytest.mark.parametrize("level", ["quick", "full"])
def test_every_flipped_bit_of_the_plan_is_found(folder, level):
    for at in random.Random(0).sample(range((folder / PLAN).stat().st_size), 40):
        flip(folder / PLAN, at, at % 8)
        assert found(verify(folder, level)) == [("", "", "plan")]
        flip(folder / PLAN, at, at % 8)


def test_every_flipped_bit_of_the_fingerprint_in_the_manifest_is_found(folder):
    path = folder / "manifest.json"
    content = path.read_bytes()
    begin, end = content.index(b'"fingerprint"'), content.index(b'"provenance"')
    for at in range(begin, end - 3, 5):
        flip(path, at, 0)
        assert found(verify(folder, "quick"))[0] == ("", "", "manifest")
        path.write_bytes(content)


def test_a_broken_manifest_hides_nothing_else(folder):
    (folder / "manifest.json").write_text("{")
    flip(shard_path(folder, "shard-00001"), -1 + shard_path(folder, "shard-00001").stat().st_size)
    assert [part for *_, part in found(verify(folder))] == ["manifest", "image"]


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
def test_a_shard_that_is_lost_cut_lengthened_zeroed_or_another_is_found(folder, damage, quick, full):
    damage(shard_path(folder, "shard-00001"))
    for level, parts in (("quick", quick), ("full", full)):
        report = verify(folder, level)
        assert {part for *_, part in found(report)} == parts
        assert report.damaged == (["shard-00001"] if parts else [])


def test_all_problems_are_told_at_once(folder):
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
    """The same, but the last image is said to lie elsewhere."""
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
        (lambda receipt: moved(receipt, 4096), "leave a hole"),
        (lambda receipt: moved(receipt, -4096), "overlap"),
        (without_an_image, "leave a hole"),
        (with_another_grid, "other patch grids"),
        (with_other_tokens, "by its receipt it should be"),
        (lambda receipt: replace(receipt, fingerprint="1" * 64), "belongs to another cache"),
    ],
)
def test_a_receipt_with_a_good_checksum_that_does_not_fit_its_shard_is_found(folder, change, what):
    rewrite(folder, "shard-00000", change)
    report = verify(folder)
    assert report.damaged == ["shard-00000"]
    assert any(what in problem.what for problem in report.problems)


def test_shards_without_a_receipt_are_unfinished_and_no_damage(folder):
    receipt_path(folder, "shard-00001").unlink()
    new = Shard("shard-00099", (PlannedImage("f" * 64, 1, ("x.png",)),))
    extend_plan(folder, read_plan(folder), [new])
    shard_path(folder, "shard-00007").write_bytes(b"begun")
    report = verify(folder)
    assert report.problems == []
    assert report.unfinished == ["shard-00001", "shard-00007", "shard-00099"]
    assert "3 shards unfinished: shard-00001, shard-00007, shard-00099" in report.text()


def test_a_planned_shard_whose_images_others_hold_is_not_unfinished(folder):
    images = read_plan(folder).shards[0].images
    extend_plan(folder, read_plan(folder), [Shard("shard-00099", images)])
    assert verify(folder, "quick").unfinished == []


def test_a_broken_index_is_no_damage_but_is_told(folder):
    flip(folder / "index.safetensors", 100)
    report = verify(folder, "quick")
    assert (report.problems, report.index) == ([], "not used")
    (folder / "index.safetensors").unlink()
    assert verify(folder, "quick").index == "none"


def test_what_the_disk_does_not_give_is_a_problem_among_others(folder, monkeypatch):
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


def test_a_slow_disk_is_read_by_threads_with_the_same_result(folder, monkeypatch):
    shard_path(folder, "shard-00001").unlink()
    expected = found(verify(folder, "quick"))
    monkeypatch.setattr(walk, "SLOW_S", 0)
    monkeypatch.setattr(walk, "NUM_TRIED", 1)
    assert found(verify(folder, "quick")) == expected == [("shard-00001", "", "shard")]


def test_many_problems_are_cut_short_in_text_and_whole_in_the_report(folder, monkeypatch):
    monkeypatch.setattr(module, "NUM_NAMED", 2)
    for name in finished_shards(folder):
        shard_path(folder, name).unlink()
    report = verify(folder)
    assert len(report.problems) == report.num_shards > 2
    assert f"and {report.num_shards - 2} more" in report.text()


def test_what_is_no_cache_is_refused(tmp_path):
    with pytest.raises(CacheError, match="is no cache"):
        verify(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format_version": 99, "fingerprint": {}}')
    with pytest.raises(CacheError, match="format version 99"):
        verify(tmp_path)


def test_a_cache_without_shards_is_sound(site, tmp_path):
    (site.path / "bad.png").write_text("no image")
    site.build(site.index(site.path / "bad.png"))
    report = verify(site.folder())
    assert (report.problems, report.num_images, report.num_shards) == ([], 0, 1)


def test_looking_while_a_worker_is_at_work_disturbs_nobody(folder):
    (folder / CLAIMS).mkdir(exist_ok=True)
    claim = folder / CLAIMS / "shard-00005.json"
    claim.write_text("{}")
    verify(folder)
    assert claim.exists() and time.time() - claim.stat().st_mtime < 60


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_lost_plan_is_a_problem_of_no_shard(folder, level):
    names = finished_shards(folder)
    (folder / PLAN).unlink()
    report = verify(folder, level)
    assert found(report) == [("", "", "plan")] and report.damaged == []
    assert f"{folder / PLAN} is missing: {len(names)} finished shards are in no plan" in report.text()
    assert "1 problem;" in report.text() and "mend it with: lookonce cache repair" in report.text()


def test_a_lost_last_part_of_the_plan_is_a_problem(site, folder):
    site.build(site.index(site.noise("new.png", 100)))
    plan_path(folder, 1).unlink()
    [problem] = verify(folder, "quick").problems
    assert problem.what == f"{plan_path(folder, 1)} is missing: 1 finished shard is in no plan"


def test_what_was_planned_after_a_plan_was_lost_is_a_sound_plan(site, folder):
    (folder / PLAN).unlink()
    site.build(site.index(site.noise("new.png", 100)))
    assert verify(folder, "quick").problems == []


def test_a_cache_that_has_no_finished_shard_needs_no_plan(folder):
    shutil.rmtree(folder / "receipts")
    (folder / PLAN).unlink()
    assert verify(folder, "quick").problems == []


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_scales_and_features_of_every_dtype_are_covered(site, images, dtype):
    compute = site.use(dtype)
    site.build(images, lambda: site.Tower(dtype=compute))
    folder = site.folder()
    assert verify(folder).problems == []
    path = shard_path(folder, "shard-00000")
    last = regions(read_receipt(folder, "shard-00000"))[-1]
    flip(path, path.stat().st_size - 1)
    assert found(verify(folder)) == [("shard-00000", last.key, "image")]
