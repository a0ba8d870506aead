"""Repair: damaged shards are encoded again; manifest, plan and receipts are restored from what is left."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lookonce.cache.maintenance.repair import is_confirmed, rebuild_receipt, repair
from lookonce.cache.maintenance.verify import verify
from lookonce.cache.store.claims import Claims
from lookonce.cache.store.metadata import (
    MANIFEST,
    PLAN,
    Plan,
    Receipt,
    Shard,
    extend_plan,
    finished_shards,
    plan_path,
    read_plan,
    read_receipt,
    receipt_path,
)
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.claim_file import Process
from lookonce.datasets.images import ImageIndex
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, FeaturesMissing

DAMAGED = "shard-00001"


def only(index: ImageIndex, *paths: Path) -> ImageIndex:
    """The images of a run that has only these files."""
    key_of = {path: index.key_of[path] for path in paths}
    return replace(index, key_of=key_of, path_of={key: path for path, key in key_of.items()})


def test_an_intact_cache_is_not_changed(site, images, folder, before, run_repair):
    stamps = site.stamps()
    report = run_repair(images)
    assert (report.num_problems, report.mended, report.removed, report.left) == (0, [], [], {})
    assert site.stamps() == stamps and "nothing to repair" in report.text()


DAMAGE = {
    "an image": lambda path, flip: flip(path),
    "the header": lambda path, flip: flip(path, 100),
    "lost": lambda path, flip: path.unlink(),
    "emptied": lambda path, flip: path.write_bytes(b""),
}


@pytest.mark.guarantee("Repair rebuilds only the damaged shard.")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_only_the_damaged_shard_is_built_again(site, images, folder, before, damage, run_repair, flip):
    stamps = {path: stamp for path, stamp in site.stamps().items() if DAMAGED not in path.name}
    damage(shard_path(folder, DAMAGED), flip)
    report = run_repair(images)
    assert report.removed == [DAMAGED] and report.num_again == len(read_receipt(folder, DAMAGED).images)
    assert site.stamps().items() >= stamps.items()
    assert f"{report.num_again} images to encode again" in report.text()


def test_quick_repairs_what_quick_finds(site, images, folder, before, run_repair, flip):
    flip(shard_path(folder, DAMAGED))
    assert run_repair(images, level="quick").num_problems == 0
    shard_path(folder, DAMAGED).unlink()
    assert run_repair(images, level="quick").removed == [DAMAGED]


def test_a_damaged_shard_is_kept_if_the_file_of_an_image_is_gone(site, images, folder, run_repair, flip):
    keys = sorted(read_receipt(folder, DAMAGED).images)
    images.path_of[keys[0]].unlink()
    flip(shard_path(folder, DAMAGED))
    stamps = site.stamps()
    report = run_repair(images)
    assert list(report.left) == [DAMAGED] and not report.removed
    assert (
        f"files of 1 of its {len(keys)} images were not found: {keys[0]}" in report.text() and "--drop" in report.text()
    )
    assert site.stamps() == stamps
    assert {key for key in images.path_of if key in VisionCache.open(folder)} == set(images.path_of)


def test_drop_removes_such_a_shard_and_names_the_lost_images(site, images, folder, run_repair, flip):
    keys = sorted(read_receipt(folder, DAMAGED).images)
    images.path_of[keys[0]].unlink()
    flip(shard_path(folder, DAMAGED))
    report = run_repair(images, drop=True)
    assert (report.removed, report.lost, report.num_again) == ([DAMAGED], [keys[0]], len(keys) - 1)
    assert f"lost 1 image, whose files were not found: {keys[0]}" in report.text()
    cache = VisionCache.open(folder)
    assert set(cache.keys()) == set(images.path_of) - {keys[0]}
    with pytest.raises(FeaturesMissing):
        cache[keys[0]]
    assert verify(folder).problems == []


def test_a_changed_file_does_not_count_as_its_image(site, images, folder, run_repair, flip):
    key = next(iter(read_receipt(folder, DAMAGED).images))
    site.noise(images.path_of[key].name, seed=99)
    flip(shard_path(folder, DAMAGED))
    assert list(run_repair(images).left) == [DAMAGED]


def test_an_image_that_another_shard_has_is_not_lost(site, images, folder, before, run_repair, flip):
    extend_plan(folder, read_plan(folder), [Shard("shard-00099", read_plan(folder).shards[1].images)])
    receipt_path(folder, DAMAGED).unlink()
    site.build(images)  # builds both
    assert read_receipt(folder, "shard-00099").images.keys() == read_receipt(folder, DAMAGED).images.keys()
    images.path_of[next(iter(read_receipt(folder, DAMAGED).images))].unlink()
    flip(shard_path(folder, DAMAGED))
    report = run_repair(images)
    assert (report.removed, report.lost, report.left) == ([DAMAGED], [], {})


def test_images_that_only_the_plan_names_are_encoded_again(site, images, folder, before, run_repair, flip):
    flip(shard_path(folder, DAMAGED))
    foreign = [path for path, key in images.key_of.items() if key not in read_receipt(folder, DAMAGED).images]
    report = run_repair(only(images, *foreign))
    assert report.removed == [DAMAGED] and report.left == {}


def test_files_of_the_run_are_preferred_to_those_of_the_plan(site, images, folder, before, run_repair, flip):
    moved = site.path / "moved"
    moved.mkdir()
    paths = [path.rename(moved / path.name) for path in images.key_of]
    flip(shard_path(folder, DAMAGED))
    assert run_repair(site.index(*paths)).removed == [DAMAGED]


def test_a_quarantined_image_stays_in_quarantine(site, images, run_repair, flip):
    (site.path / "bad.png").write_text("no image")
    index = site.index(*images.key_of, site.path / "bad.png")
    site.build(index)
    [(shard, failed)] = [
        (name, receipt.failed)
        for name in finished_shards(site.folder())
        if (receipt := read_receipt(site.folder(), name)).failed
    ]
    flip(shard_path(site.folder(), shard))
    run_repair(index)
    assert VisionCache.open(site.folder()).failed.keys() == failed.keys()
    (site.path / "bad.png").unlink()  # the shard can be replaced without it
    flip(shard_path(site.folder(), shard))
    assert run_repair(index).removed == [shard]


def test_a_cache_with_a_living_worker_is_not_repaired(site, images, folder, run_repair, flip):
    flip(shard_path(folder, DAMAGED))
    flip(receipt_path(folder, "shard-00002"), 3)
    (folder / MANIFEST).write_text("{")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with Claims(folder, Process.this()) as claims:
        assert claims.take("shard-00009", 1)
        with pytest.raises(CacheError, match=f"in use by .*process {os.getpid()} on .*; wait until it has ended"):
            run_repair(images)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_cache_of_another_fingerprint_is_not_repaired(site, images, folder):
    with pytest.raises(CacheMismatch, match="made from something else"):
        repair(folder, replace(site.fingerprint, tower_sha256="1" * 64), images)


def test_a_folder_without_shards_is_not_repaired(site, images):
    with pytest.raises(CacheError, match="holds no shards to repair; make them with: lookonce cache build"):
        repair(site.folder(), site.fingerprint, images)
    assert not site.folder().exists()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_interrupted_repair_can_be_run_again(site, images, folder, before, monkeypatch, step, run_repair, flip):
    flip(shard_path(folder, DAMAGED))
    unlink = Path.unlink
    steps = [folder / "index.safetensors", shard_path(folder, DAMAGED), receipt_path(folder, DAMAGED)]

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path == steps[step]:
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            repair(folder, site.fingerprint, images)
    assert run_repair(images).removed == [DAMAGED]


def test_a_shard_of_unknown_content_is_not_removed(site, images, folder, before, run_repair, flip):
    """Its receipt is broken, the plan is lost, and its header cannot be read, so nothing names its images."""
    good = {path: path.read_bytes() for path in (receipt_path(folder, DAMAGED), shard_path(folder, DAMAGED))}
    (folder / PLAN).unlink()
    receipt_path(folder, DAMAGED).write_text("{")
    flip(shard_path(folder, DAMAGED))  # the header still names its images
    assert run_repair(images).removed == [DAMAGED]
    for path, content in good.items():
        path.write_bytes(content)
    receipt_path(folder, DAMAGED).write_text("{")
    (folder / PLAN).unlink()
    flip(shard_path(folder, DAMAGED), 7)
    report = run_repair(images)
    assert (report.removed, list(report.left)) == ([], [DAMAGED]) and shard_path(folder, DAMAGED).exists()
    assert run_repair(images, drop=True).removed == [DAMAGED]
    site.build(images)


def test_a_shard_that_was_repaired_meanwhile_is_kept(site, images, folder, before, monkeypatch, run_repair, flip):
    sound = shard_path(folder, DAMAGED).read_bytes()
    flip(shard_path(folder, DAMAGED))
    really_verify = verify

    def slow_verify(*args):
        report = really_verify(*args)
        shard_path(folder, DAMAGED).write_bytes(sound)
        return report

    monkeypatch.setattr("lookonce.cache.maintenance.repair.verify", slow_verify)
    report = run_repair(images)
    assert (report.num_problems, report.removed, report.left) == (1, [], {})


def test_a_broken_receipt_of_an_intact_shard_is_restored_from_the_shard(site, images, folder, before, run_repair, flip):
    path, shard = receipt_path(folder, DAMAGED), shard_path(folder, DAMAGED)
    original, content = read_receipt(folder, DAMAGED), path.read_bytes()
    digit = content.index(next(iter(original.images.values())).xxh3_64.encode()) + 3  # of a checksum
    for at in (digit, *random.Random(0).sample(range(len(content)), 20)):
        path.write_bytes(content)
        flip(path, at)
        stamp = shard.stat().st_mtime_ns
        report = run_repair(images)
        if (
            report.removed and at != digit
        ):  # for example, the flip put a quotation mark into a checksum, which then cannot be found
            continue
        assert report.mended == [path.name] and shard.stat().st_mtime_ns == stamp
        assert plain(read_receipt(folder, DAMAGED)) == plain(original)


def plain(receipt: Receipt) -> Receipt:
    """The receipt without what cannot be rebuilt from the shard."""
    images = {key: replace(entry, norms=(), peaks=()) for key, entry in receipt.images.items()}
    return replace(receipt, images=images, host="", finished=0.0, seconds=0.0, failed={})


def test_an_empty_receipt_or_one_of_a_damaged_shard_is_not_trusted(site, images, folder, before, run_repair, flip):
    flip(receipt_path(folder, DAMAGED), 3)
    flip(shard_path(folder, DAMAGED))
    assert run_repair(images).removed == [DAMAGED]
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


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_lost_or_broken_plan_is_rebuilt_from_the_receipts(site, images, folder, before, run_repair, flip, is_lost):
    def content(plan: Plan) -> tuple[list[object], set[object]]:
        shards = [(shard.name, set(shard.keys), shard.num_tokens) for shard in plan.shards]
        return shards, {image.files for image in plan.images()}

    planned = read_plan(folder)
    (folder / PLAN).unlink() if is_lost else flip(folder / PLAN, 300)
    report = run_repair(images)
    assert (report.mended, report.num_problems, report.left) == ([PLAN], 1, {})
    assert content(read_plan(folder)) == content(planned)


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
