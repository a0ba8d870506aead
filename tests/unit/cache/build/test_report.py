"""The report of a build: its numbers add up, and its text names them."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lookonce.cache.build.worker import BuildReport

REPORT = BuildReport(
    folder=Path("/caches/0a1b"),
    num_wanted=6500,
    num_encoded=6400,
    num_by_others=0,
    num_reused=0,
    num_missing=0,
    quarantined={},
    num_shards=3,
    size_bytes=4_200_000_000,
    seconds=61.0,
    phases={},
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "encoded 6,400 images in 1 min 1 s; 3 shards, 4.2 GB; complete"),
        ({"num_encoded": 1, "num_shards": 1}, "encoded 1 image in 1 min 1 s; 1 shard, 4.2 GB; complete"),
        (
            {"num_reused": 100},
            "encoded 6,400 images in 1 min 1 s, 100 of 6,500 images reused; 3 shards, 4.2 GB; complete",
        ),
        (
            {"num_encoded": 1000, "num_by_others": 3000, "num_reused": 2400, "num_missing": 100},
            "encoded 1,000 images in 1 min 1 s, 3,000 by other workers, 2,400 of 6,500 images reused; "
            "3 shards, 4.2 GB; 100 images being encoded by other workers",
        ),
        (
            {"num_encoded": 0, "num_reused": 6500},
            "nothing new encoded, 6,500 of 6,500 images reused; 3 shards, 4.2 GB; complete",
        ),
        (
            {"num_encoded": 0, "num_by_others": 6500},
            "nothing new encoded, 6,500 by other workers, 0 of 6,500 images reused; 3 shards, 4.2 GB; complete",
        ),
    ],
)
def test_the_text_of_a_report(changes, expected):
    assert replace(REPORT, **changes).text() == f"cache /caches/0a1b: {expected}"


def test_a_report_names_the_first_failures_and_the_file_with_all(site):
    reasons = {f"{number}": f"cannot decode image {number}.jpg" for number in range(7)}
    first, headline, *named = replace(REPORT, quarantined=reasons).text().splitlines()
    assert first == f"{REPORT.text()} but for 7 images"
    assert headline == "7 images could not be encoded (see /caches/0a1b/quarantine.jsonl):"
    assert named == [f"  {reason}" for reason in list(reasons.values())[:5]]


def test_the_numbers_of_a_build_add_up(site, images):
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(5))
    num_kept = len(site.stored())
    (site.path / "bad.jpg").write_text("no image")
    paths = [*images.key_of, site.path / "bad.jpg", site.path / "absent.jpg"]
    report = site.build(site.index(*paths))
    assert (report.num_wanted, report.num_reused, report.num_encoded) == (9, num_kept, 8 - num_kept)
    assert (report.num_by_others, report.num_missing, len(report.quarantined)) == (0, 0, 2)
    shards = list((report.folder / "shards").iterdir())
    assert (report.num_shards, report.size_bytes) == (len(shards), sum(path.stat().st_size for path in shards))
    assert report.seconds > 0
    assert re.fullmatch(
        rf"cache {report.folder}: encoded {8 - num_kept} images in \d\.\d s, {num_kept} of 9 images reused; "
        rf"{len(shards)} shards, \d\.\d MB; complete but for 2 images",
        report.text().splitlines()[0],
    )
    assert asdict(report).keys() >= {"folder", "quarantined", "phases"}


def test_a_build_without_any_good_image_reports_its_failures(site):
    (site.path / "bad.jpg").write_text("no image")
    for _ in range(2):
        report = site.build(site.index(site.path / "bad.jpg"))
        assert (report.num_encoded, report.num_reused, len(report.quarantined)) == (0, 0, 1)
        assert "0 of 1 image reused" in report.text() and "1 image could not be encoded" in report.text()


def test_the_index_is_written_only_if_it_is_missing_or_outdated(site, images):
    index = site.build(images).folder / "index.safetensors"
    before = index.stat().st_mtime_ns
    site.build(images, site.no_tower)
    assert index.stat().st_mtime_ns == before
    index.unlink()
    site.build(images, site.no_tower)
    assert index.exists()
