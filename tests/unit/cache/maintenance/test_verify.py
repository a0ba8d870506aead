"""Verify: every flipped bit is found and traced to its image; unfinished shards and a broken index are not damage."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.small_caches import flip

from lookonce.cache.maintenance.verify import Reading, VerifyReport, regions, verify
from lookonce.cache.store.claims import CLAIMS
from lookonce.cache.store.metadata import (
    PLAN,
    Entry,
    PlannedImage,
    Receipt,
    Shard,
    extend_plan,
    finished_shards,
    read_plan,
    read_receipt,
    receipt_path,
    to_text,
)
from lookonce.cache.store.shards import shard_path


def rewrite(folder: Path, name: str, change: Callable[[Receipt], Receipt]) -> None:
    """Replace a receipt by a changed one that has a valid checksum."""
    receipt_path(folder, name).write_text(to_text(change(read_receipt(folder, name))))


def found(report: VerifyReport) -> list[tuple[str, str, str]]:
    """Shard, image and part of each problem."""
    return [(problem.shard, problem.image, problem.part) for problem in report.problems]


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


@pytest.fixture
def folder(folder_with_quarantine) -> Path:
    return folder_with_quarantine


@pytest.mark.parametrize("level", ["quick", "full"])
def test_an_intact_cache_has_no_problems_and_is_not_written_to(folder, level):
    (folder / CLAIMS).mkdir(exist_ok=True)
    (folder / CLAIMS / "shard-00005.json").write_text("{}")
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
def test_quick_finds_every_flipped_bit_of_a_header(folder):
    [name, *_] = finished_shards(folder)
    size = read_receipt(folder, name).header_bytes
    for at in (0, 7, 8, *random.Random(0).sample(range(size), 20), size - 1):
        flip(shard_path(folder, name), at)
        assert found(verify(folder, "quick")) == [(name, "", "header")]
        flip(shard_path(folder, name), at)


@pytest.mark.guarantee("Every flipped byte of a shard is found and named.")
@pytest.mark.parametrize("level", ["quick", "full"])
@pytest.mark.parametrize("part", ["receipt", "plan"])
def test_every_flipped_bit_of_a_receipt_or_the_plan_is_found(folder, level, part):
    shard = finished_shards(folder)[0] if part == "receipt" else ""
    path = receipt_path(folder, shard) if shard else folder / PLAN
    for at in random.Random(0).sample(range(path.stat().st_size), 40):
        flip(path, at, at % 8)
        assert found(verify(folder, level)) == [(shard, "", part)]
        flip(path, at, at % 8)


DAMAGE = {
    "lost": (Path.unlink, {"shard"}, {"shard"}),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size - 1), {"shard"}, {"shard", "image"}),
    "lengthened": (lambda path: path.write_bytes(path.read_bytes() + b"0"), {"shard"}, {"shard"}),
    "end zeroed": (lambda path: path.write_bytes(path.read_bytes()[:-5000] + bytes(5000)), set(), {"image"}),
    "swapped": (
        lambda path: path.write_bytes(path.with_name("shard-00000.safetensors").read_bytes()),
        *({"shard", "header"}, {"shard", "header", "image"}),
    ),
}
"""Damage of a shard, and the parts that have problems at the levels quick and full."""


@pytest.mark.parametrize(("damage", "quick", "full"), DAMAGE.values(), ids=DAMAGE)
def test_a_lost_cut_lengthened_zeroed_or_swapped_shard_is_found(folder, damage, quick, full):
    damage(shard_path(folder, "shard-00001"))
    for level, parts in (("quick", quick), ("full", full)):
        report = verify(folder, level)
        assert {part for *_, part in found(report)} == parts
        assert report.damaged == (["shard-00001"] if parts else [])


def test_all_problems_are_reported_at_once(folder):
    [first, second, third, *_] = finished_shards(folder)
    for _, region in regions(read_receipt(folder, first))[1:]:
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


def with_entry(receipt: Receipt, number: int, change: Callable[[Entry], Entry]) -> Receipt:
    """The receipt with another entry of one image, by the order of their offsets."""
    key, entry = sorted(receipt.images.items(), key=lambda item: item[1].offset)[number]
    return replace(receipt, images=receipt.images | {key: change(entry)})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda receipt: with_entry(receipt, -1, lambda one: replace(one, offset=one.offset + 4096)), "header says"),
        (lambda receipt: with_entry(receipt, -1, lambda one: replace(one, offset=one.offset - 4096)), "header says"),
        (lambda receipt: replace(receipt, images=dict(list(receipt.images.items())[1:])), "the header says"),
        (lambda receipt: with_entry(receipt, 0, lambda one: replace(one, grid_thw=(1, 2, 2))), "different patch grids"),
        (
            lambda receipt: with_entry(receipt, 0, lambda one: replace(one, num_tokens=one.num_tokens - 1)),
            "the header says",
        ),
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
    _, (key, first), *_ = regions(read_receipt(folder, name))
    pread = os.pread

    def fail(descriptor: int, num_bytes: int, offset: int) -> bytes:
        if os.fstat(descriptor).st_ino == inode and offset == first.offset:
            raise OSError(errno.EIO, "Input/output error")
        return pread(descriptor, num_bytes, offset)

    inode = shard_path(folder, name).stat().st_ino
    monkeypatch.setattr(os, "pread", fail)
    [problem] = verify(folder).problems
    assert (problem.shard, problem.image) == (name, key) and "Input/output error" in problem.what


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


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_scales_and_features_of_every_dtype_have_checksums(site, images, dtype):
    compute = site.use(dtype)
    site.build(images, lambda: site.Tower(dtype=compute))
    folder = site.folder()
    assert verify(folder).problems == []
    path = shard_path(folder, "shard-00000")
    *_, (last, _) = regions(read_receipt(folder, "shard-00000"))
    flip(path)
    assert found(verify(folder)) == [("shard-00000", last, "image")]


def test_every_flipped_bit_of_the_fingerprint_in_the_manifest_is_found(folder):
    path = folder / "manifest.json"
    content = path.read_bytes()
    begin, end = content.index(b'"fingerprint"'), content.index(b'"provenance"')
    for at in range(begin, end - 3, 5):
        flip(path, at, 0)
        assert found(verify(folder, "quick"))[0] == ("", "", "manifest")
        path.write_bytes(content)


def test_a_broken_manifest_does_not_hide_other_problems(folder):
    (folder / "manifest.json").write_text("{")
    flip(shard_path(folder, "shard-00001"))
    assert [part for *_, part in found(verify(folder))] == ["manifest", "image"]


def test_shards_without_a_receipt_are_unfinished_and_not_damage(folder):
    receipt_path(folder, "shard-00001").unlink()
    new = Shard("shard-00099", (PlannedImage("f" * 64, 1, ("x.png",)),))
    extend_plan(folder, read_plan(folder), [new])
    shard_path(folder, "shard-00007").write_bytes(b"begun")
    report = verify(folder)
    assert report.problems == []
    assert report.unfinished == ["shard-00001", "shard-00007", "shard-00099"]
    assert "3 shards unfinished: shard-00001, shard-00007, shard-00099" in report.text()


def test_a_broken_index_is_reported_and_not_damage(folder):
    flip(folder / "index.safetensors", 100)
    report = verify(folder, "quick")
    assert (report.problems, report.index) == ([], "not used")
    (folder / "index.safetensors").unlink()
    assert verify(folder, "quick").index == "none"


def test_nothing_is_said_of_the_index_if_the_manifest_is_broken(folder):
    (folder / "manifest.json").write_text("")
    report = verify(folder, "quick")
    assert report.index == "unknown" and "the index" not in report.text()


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_lost_plan_is_a_problem_outside_the_shards(folder, level):
    (folder / PLAN).unlink()
    report = verify(folder, level)
    assert found(report) == [("", "", "plan")] and report.damaged == []
    assert f"{folder / PLAN} is missing" in report.text()
    assert "1 problem;" in report.text() and "repair it with: lookonce cache repair" in report.text()


@pytest.mark.guarantee("Every flipped byte of a shard is found and named.")
def test_each_of_200_flipped_bits_is_found_and_traced_to_its_shard_and_image(folder):
    rng = random.Random(0)
    names = finished_shards(folder)
    regions_of = {name: regions(read_receipt(folder, name)) for name in names}
    seen = set()
    for _ in range(200):
        name, bit = rng.choice(names), rng.randrange(8)
        at = rng.randrange(shard_path(folder, name).stat().st_size)
        [key] = [key for key, part in regions_of[name] if part.offset <= at < part.offset + part.size_bytes]
        flip(shard_path(folder, name), at, bit)
        [problem] = verify(folder).problems
        assert (problem.shard, problem.image) == (name, key)
        assert problem.part == "image" if key else "header" in problem.what
        assert bool(problem.file) == bool(key)
        flip(shard_path(folder, name), at, bit)
        seen.add((name, key))
    assert verify(folder).problems == []
    assert {name for name, _ in seen} == set(names) and any(not key for _, key in seen)
