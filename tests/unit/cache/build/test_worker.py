"""Building a cache: each image is encoded once, an interruption costs the current shard, and the report adds up."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import accumulate

import pytest

from lookonce.cache.build.encode import MAX_ON_DEVICE
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import read_plan
from lookonce.cache.store.reader import VisionCache

NUM_IMAGES = 8


def test_building_twice_encodes_nothing_loads_no_tower_and_writes_only_a_missing_index(site, images):
    first = site.build(images)
    before, index = site.stamps(), first.folder / "index.safetensors"
    written = index.stat().st_mtime_ns
    second = site.build(images, site.no_tower)
    site.build(images, site.no_tower, shard_bytes=10**9)
    assert index.stat().st_mtime_ns == written
    assert (first.num_encoded, first.num_reused, first.num_missing) == (NUM_IMAGES, 0, 0)
    assert (second.num_encoded, second.num_reused, second.num_missing) == (0, NUM_IMAGES, 0)
    index.unlink()
    site.build(images, site.no_tower)
    assert index.exists() and site.stamps() == before


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


def test_the_manifest_has_fingerprint_provenance_and_library_versions(site, images):
    manifest = json.loads((site.build(images).folder / "manifest.json").read_text())
    assert Fingerprint.from_json(manifest["fingerprint"]) == site.fingerprint
    assert (manifest["format_version"], manifest["sha256"]) == (2, site.fingerprint.sha256)
    assert manifest["provenance"]["model"] == "fake"
    assert manifest["provenance"].keys() >= {"created", "host", "python"}
    assert manifest["provenance"]["libraries"].keys() >= {"lookonce", "torch", "transformers", "pillow"}


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
