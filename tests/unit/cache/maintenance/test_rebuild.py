"""Repair: manifest, plan and receipts are restored from what is left, and only from intact shards."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.cache.maintenance.repair import is_confirmed, rebuild_receipt
from lookonce.cache.store.metadata import (
    MANIFEST,
    PLAN,
    Receipt,
    Shard,
    finished_shards,
    plan_path,
    read_plan,
    read_receipt,
    receipt_path,
)
from lookonce.cache.store.shards import shard_path
from lookonce.errors import CacheCorrupt

DAMAGED = "shard-00001"


def test_a_broken_receipt_of_an_intact_shard_is_restored_from_the_shard(site, images, folder, before, run_repair, flip):
    path, shard = receipt_path(folder, DAMAGED), shard_path(folder, DAMAGED)
    original, content = read_receipt(folder, DAMAGED), path.read_bytes()
    for at in random.Random(0).sample(range(len(content)), 20):
        path.write_bytes(content)
        flip(path, at)
        stamp = shard.stat().st_mtime_ns
        report = run_repair(images)
        if report.removed:  # for example, the flip put a quotation mark into a checksum, which then cannot be found
            continue
        assert report.mended == [path.name] and shard.stat().st_mtime_ns == stamp
        assert plain(read_receipt(folder, DAMAGED)) == plain(original)


def plain(receipt: Receipt) -> Receipt:
    """The receipt without what cannot be rebuilt from the shard."""
    images = {key: replace(entry, norms=(), peaks=()) for key, entry in receipt.images.items()}
    return replace(receipt, images=images, host="", finished=0.0, seconds=0.0, failed={})


def test_a_flipped_digit_of_a_checksum_does_not_condemn_the_shard(site, images, folder, before, run_repair, flip):
    path = receipt_path(folder, DAMAGED)
    content = path.read_bytes()
    digits = next(iter(read_receipt(folder, DAMAGED).images.values())).xxh3_64.encode()
    flip(path, content.index(digits) + 3)
    assert run_repair(images).mended == [path.name]


def test_a_broken_receipt_of_a_damaged_shard_is_not_trusted(site, images, folder, before, run_repair, flip):
    flip(receipt_path(folder, DAMAGED), 3)
    flip(shard_path(folder, DAMAGED))
    assert run_repair(images).removed == [DAMAGED]


def test_a_shard_whose_receipt_is_empty_is_removed(site, images, folder, before, run_repair):
    receipt_path(folder, DAMAGED).write_text("{")
    assert run_repair(images).removed == [DAMAGED]


def test_receipts_that_are_all_lost_are_restored_from_the_shards(site, images, folder, before, run_repair):
    shutil.rmtree(folder / "receipts")
    (folder / "index.safetensors").unlink()
    shards = {path: path.stat().st_mtime_ns for path in (folder / "shards").iterdir()}
    report = run_repair(images)
    assert report.adopted == finished_shards(folder) and not report.removed
    assert {path: path.stat().st_mtime_ns for path in (folder / "shards").iterdir()} == shards
    assert "only the tower can tell" in report.text()


def test_a_cache_is_restored_from_its_shards_alone(site, images, folder, before, run_repair):
    for path in [path for path in folder.iterdir() if path.name != "shards"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    report = run_repair(images, provenance={"model": "fake"})
    assert report.mended == [MANIFEST, PLAN] and len(report.adopted) > 2
    assert json.loads((folder / MANIFEST).read_text())["provenance"]["model"] == "fake"


def test_only_complete_shards_of_this_cache_get_new_receipts(site, images, folder, before, run_repair):
    shutil.rmtree(folder / "receipts")
    path = shard_path(folder, DAMAGED)
    path.write_bytes(path.read_bytes()[:-1])
    report = run_repair(images)
    assert DAMAGED not in report.adopted and len(report.adopted) > 1
    site.build(images)


def test_a_single_lost_receipt_is_not_damage_and_its_shard_is_not_trusted(
    site, images, folder, before, run_repair, flip
):
    flip(shard_path(folder, DAMAGED))
    receipt_path(folder, DAMAGED).unlink()
    report = run_repair(images)
    assert (report.num_problems, report.adopted) == (0, [])
    site.build(images)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_receipts_of_every_dtype_are_rebuilt_from_shards(site, images, dtype):
    compute = site.use(dtype)
    site.build(images, lambda: site.Tower(dtype=compute))
    for name in finished_shards(site.folder()):
        receipt = rebuild_receipt(site.folder(), name, site.fingerprint)
        assert plain(receipt) == plain(read_receipt(site.folder(), name))
        assert is_confirmed(receipt, receipt_path(site.folder(), name).read_bytes())


def test_no_receipt_is_rebuilt_from_a_shard_of_another_cache(site, images, folder):
    with pytest.raises(CacheCorrupt, match=f"{DAMAGED}.safetensors is not a complete shard of this cache"):
        rebuild_receipt(folder, DAMAGED, replace(site.fingerprint, tower_sha256="1" * 64))


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", b"\xff" * 8, (2).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"null", bytes(4096)],
)
def test_no_receipt_is_rebuilt_from_another_file(site, images, folder, content):
    shard_path(folder, DAMAGED).write_bytes(content)
    with pytest.raises(CacheCorrupt, match="is broken"):
        rebuild_receipt(folder, DAMAGED, site.fingerprint)


def test_a_broken_manifest_is_restored(site, images, folder, before, run_repair, flip):
    for damage in (lambda path: path.write_text("{"), lambda path: flip(path, 120), Path.unlink):
        damage(folder / MANIFEST)
        assert run_repair(images).mended == [MANIFEST]


def test_a_broken_plan_is_rebuilt_from_the_receipts(site, images, folder, before, run_repair, flip):
    planned = read_plan(folder)
    flip(folder / PLAN, 300)
    report = run_repair(images)
    assert report.mended == [PLAN]
    after = read_plan(folder)
    assert [(shard.name, set(shard.keys), shard.num_tokens) for shard in after.shards] == [
        (shard.name, set(shard.keys), shard.num_tokens) for shard in planned.shards
    ]
    assert {image.files for image in after.images()} == {image.files for image in planned.images()}


def test_each_file_of_a_plan_keeps_its_number(site, images, folder, before, run_repair, flip):
    new = site.index(*images.key_of, *(site.noise(f"new-{number}.png", 100 + number) for number in range(2)))
    site.build(new)
    before |= site.stored()
    planned = read_plan(folder)
    assert planned.num_files == 2
    content = [plan_path(folder, part).read_bytes() for part in range(2)]
    for damage, parts in itertools.product((lambda path: flip(path, 100), Path.unlink), ((0,), (1,), (0, 1))):
        for part in range(2):
            plan_path(folder, part).write_bytes(content[part])
        for part in parts:
            damage(plan_path(folder, part))
        assert run_repair(new).num_problems == 1
        assert [shard.name for shard in read_plan(folder).shards] == [shard.name for shard in planned.shards]


def test_a_lost_plan_is_rebuilt_from_the_receipts(site, images, folder, before, run_repair):
    planned = read_plan(folder)
    (folder / PLAN).unlink()
    report = run_repair(images)
    assert (report.mended, report.num_problems, report.left) == ([PLAN], 1, {})
    after = read_plan(folder)
    assert [(shard.name, set(shard.keys)) for shard in after.shards] == [
        (shard.name, set(shard.keys)) for shard in planned.shards
    ]
    assert {image.files for image in after.images()} == {image.files for image in planned.images()}


def test_unfinished_shards_of_a_rebuilt_plan_are_empty_and_built_again(site, images, folder, before, run_repair, flip):
    receipt_path(folder, DAMAGED).unlink()
    shard_path(folder, DAMAGED).unlink()
    flip(folder / PLAN, 100)
    run_repair(images)
    assert read_plan(folder).shards[1] == Shard(DAMAGED, ())
    site.build(images)


def test_all_kinds_of_damage_at_once(site, images, folder, before, run_repair, flip):
    flip(folder / MANIFEST, 120)
    flip(folder / PLAN, 100)
    flip(folder / "index.safetensors", 500)
    flip(receipt_path(folder, "shard-00000"), 3)
    flip(shard_path(folder, DAMAGED))
    report = run_repair(images)
    assert (sorted(report.mended), report.removed) == ([MANIFEST, PLAN, "shard-00000.json"], [DAMAGED])
