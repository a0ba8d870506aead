"""Building a cache: each image is encoded once, an interruption costs the current shard, and the report adds up."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path

import pytest
from support.processes import NOTICE, WARNING, send

from lookonce.cache.build.encode import MAX_ON_DEVICE
from lookonce.cache.build.worker import BuildReport, StopSignals
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import read_plan, read_receipts, receipt_path
from lookonce.cache.store.reader import VisionCache
from lookonce.errors import CacheMismatch

NUM_IMAGES = 8


def test_building_twice_encodes_nothing_the_second_time_and_loads_no_tower(site, images):
    first = site.build(images)
    before = site.stamps()
    second = site.build(images, site.no_tower)
    site.build(images, site.no_tower, shard_bytes=10**9)
    assert (first.num_encoded, first.num_reused, first.num_missing) == (NUM_IMAGES, 0, 0)
    assert (second.num_encoded, second.num_reused, second.num_missing) == (0, NUM_IMAGES, 0)
    assert site.stamps() == before


def test_every_image_is_stored_in_exactly_one_planned_shard_and_only_files_of_the_format_are_left(site, images):
    site.build(images)
    plan = read_plan(site.folder())
    assert len(plan.shards) > 2
    assert [key for shard in plan.shards for key in shard.keys] == sorted(images.path_of)
    assert site.stored().keys() == images.path_of.keys()
    assert {receipt.shard: set(receipt.images) for receipt in read_receipts(site.folder())} == {
        shard.name: set(shard.keys) for shard in plan.shards
    }
    names = ["claims", "index.safetensors", "index.xxh3", "manifest.json", "plan.json", "receipts", "shards"]
    assert sorted(path.name for path in site.folder().iterdir()) == names
    assert not site.leftovers()


@pytest.mark.parametrize("limit", [0, 1, 5, NUM_IMAGES - 1])
def test_an_interrupted_build_keeps_finished_shards_and_ends_with_the_same_tensors(site, images, limit):
    site.build(images, root="undisturbed")
    with pytest.raises(site.PowerCut):
        site.build(images, site.Tower(limit))
    kept = site.stamps()
    sizes = [len(shard.keys) for shard in read_plan(site.folder()).shards]
    num_given = max(limit - MAX_ON_DEVICE, 0)  # the last ones are still being copied back when the power is cut
    num_kept = len(VisionCache.open(site.folder()))
    assert num_kept == max(total for total in accumulate(sizes, initial=0) if total <= num_given)
    assert not site.leftovers()

    tower = site.Tower()
    resumed = site.build(images, tower)
    assert tower.num_encoded == resumed.num_encoded == NUM_IMAGES - num_kept
    assert resumed.num_reused == num_kept
    assert site.stamps().items() >= kept.items()
    assert site.stored() == site.stored("undisturbed")
    assert read_plan(site.folder()) == read_plan(site.folder("undisturbed"))


def test_a_build_interrupted_again_and_again_still_ends_with_the_same_tensors(site, images):
    attempts, is_done = 0, False
    while not is_done and attempts < NUM_IMAGES:
        with contextlib.suppress(site.PowerCut):
            is_done = site.build(images, site.Tower(6)).num_missing == 0
        attempts += 1
    assert is_done and attempts > 1
    site.build(images, root="undisturbed")
    assert site.stored() == site.stored("undisturbed")


def test_a_shard_without_a_receipt_is_built_again(site, images):
    site.build(images)
    before, receipts = site.stored(), {path.name: path.read_text() for path in site.folder().glob("receipts/*")}
    receipt_path(site.folder(), "shard-00001").unlink()
    tower = site.Tower()
    site.build(images, tower)
    assert 0 < tower.num_encoded < NUM_IMAGES
    assert site.stored() == before
    assert {path.name for path in site.folder().glob("receipts/*")} == receipts.keys()


def test_new_images_are_added_without_changing_existing_shards(site, images):
    first = site.build(images)
    before, plan = site.stamps(), read_plan(site.folder())
    new = [site.noise(f"new-{number}.png", 100 + number) for number in range(3)]
    more = site.index(*images.key_of, *new)
    tower = site.Tower()
    second = site.build(more, tower)
    assert tower.num_encoded == second.num_encoded == 3
    assert site.stamps().items() >= before.items()
    assert site.stored().keys() == more.path_of.keys()
    assert read_plan(site.folder()).shards[: first.num_shards] == plan.shards


def test_a_run_with_fewer_images_reuses_the_cache(site, images):
    site.build(images)
    report = site.build(site.index(*list(images.key_of)[:3]), site.no_tower)
    assert (report.num_wanted, report.num_encoded, report.num_reused) == (3, 0, 3)


def test_some_images_of_a_lost_shard_are_built_again_when_only_they_are_wanted(site, images):
    site.build(images)
    [lost, *_] = [shard for shard in read_plan(site.folder()).shards if len(shard.keys) > 1]
    receipt_path(site.folder(), lost.name).unlink()
    wanted = [path for path, key in images.key_of.items() if key != lost.keys[0]]
    report = site.build(site.index(*wanted))
    assert report.num_encoded == len(lost.keys) - 1
    assert site.stored().keys() == images.path_of.keys() - {lost.keys[0]}


def test_files_of_the_same_bytes_are_encoded_once(site):
    one, copy = site.noise("one.png", 0), site.path / "copy.png"
    copy.write_bytes(one.read_bytes())
    index, tower = site.index(one, copy), site.Tower()
    report = site.build(index, tower)
    assert index.num_files == 2
    assert tower.num_encoded == report.num_encoded == report.num_wanted == 1
    [image] = read_plan(site.folder()).images
    assert image.files == (str(copy), str(one))


def test_the_manifest_has_fingerprint_provenance_and_library_versions(site, images):
    manifest = json.loads((site.build(images).folder / "manifest.json").read_text())
    assert Fingerprint.from_json(manifest["fingerprint"]) == site.fingerprint
    assert (manifest["format_version"], manifest["sha256"]) == (2, site.fingerprint.sha256)
    assert manifest["provenance"]["model"] == "fake"
    assert manifest["provenance"].keys() >= {"created", "host", "python"}
    assert manifest["provenance"]["libraries"].keys() >= {"lookonce", "torch", "transformers", "pillow"}


def test_a_folder_with_another_fingerprint_is_refused(site, images):
    path = site.build(images).folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["fingerprint"]["dtype"] = "bfloat16"
    manifest["sha256"] = Fingerprint.from_json(manifest["fingerprint"]).sha256
    path.write_text(json.dumps(manifest))
    before = site.stamps()
    expected = "was made from something else; .*\n  dtype: this run 'float32', that cache 'bfloat16'"
    with pytest.raises(CacheMismatch, match=expected):
        site.build(images, site.no_tower)
    assert site.stamps() == before


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


def test_a_build_without_any_good_image_is_complete_and_reports_its_failures(site):
    (site.path / "bad.jpg").write_text("no image")
    for tower in (site.Tower, site.no_tower):
        report = site.build(site.index(site.path / "bad.jpg"), tower)
        assert (report.num_encoded, report.num_reused, len(report.quarantined)) == (0, 0, 1)
        assert (report.num_missing, report.num_shards, len(VisionCache.open(site.folder()))) == (0, 1, 0)
        assert "0 of 1 image reused" in report.text() and "1 image could not be encoded" in report.text()


def test_the_index_is_written_only_if_it_is_missing_or_outdated(site, images):
    index = site.build(images).folder / "index.safetensors"
    before = index.stat().st_mtime_ns
    site.build(images, site.no_tower)
    assert index.stat().st_mtime_ns == before
    index.unlink()
    site.build(images, site.no_tower)
    assert index.exists()


pytestmark = pytest.mark.usefixtures("restored_handlers")


@pytest.mark.parametrize(
    ("signals", "now", "name"),
    [
        ([NOTICE], False, "SIGUSR1"),
        ([WARNING], True, "SIGTERM"),
        ([NOTICE, NOTICE], True, "SIGUSR1"),
        ([NOTICE, WARNING], True, "SIGUSR1"),
        ([WARNING, NOTICE], True, "SIGTERM"),
        ([WARNING, WARNING], True, "SIGTERM"),
        ([NOTICE, NOTICE, NOTICE], True, "SIGUSR1"),
        ([], False, ""),
    ],
)
def test_only_a_single_notice_leaves_time_to_finish_the_shard(signals, now, name):
    with StopSignals() as stop:
        send(*signals)
        assert (stop.now, stop.name) == (now, name)
    send(NOTICE)  # not handled any more
    assert stop.name == name


def test_signals_are_not_handled_outside_the_main_thread():
    def use() -> None:
        with StopSignals() as stop:
            assert signal.getsignal(WARNING) is signal.SIG_IGN
            assert not stop.name

    with ThreadPoolExecutor(1) as threads:
        threads.submit(use).result()
