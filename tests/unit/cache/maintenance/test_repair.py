"""Repair: what is damaged is removed, and the build that follows writes the same again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.small_caches import flip

from lookonce.cache.maintenance.verify import remove_broken_plan, repair, verify
from lookonce.cache.store.metadata import (
    MANIFEST,
    PLAN,
    Shard,
    extend_plan,
    finished_shards,
    plan_files,
    plan_path,
    read_plan,
    read_receipt,
    receipt_path,
)
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.errors import CacheError, CacheMismatch, FeaturesMissing

DAMAGED = "shard-00001"


DAMAGE = {
    "an image": flip,
    "the header": lambda path: flip(path, 100),
    "lost": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
}


@pytest.mark.guarantee("Repair rebuilds only the damaged shard.")
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_only_the_damaged_shard_is_built_again(site, images, folder, before, damage, run_repair):
    stamps = {path: stamp for path, stamp in site.stamps().items() if DAMAGED not in path.name}
    damage(shard_path(folder, DAMAGED))
    report = run_repair(images)
    assert report.removed == [DAMAGED] and report.num_again == len(read_receipt(folder, DAMAGED).images)
    assert site.stamps().items() >= stamps.items()
    assert f"{report.num_again} images to encode again" in report.text()


def test_quick_repairs_what_quick_finds(site, images, folder, before, run_repair):
    flip(shard_path(folder, DAMAGED))
    assert run_repair(images, level="quick").num_problems == 0
    shard_path(folder, DAMAGED).unlink()
    assert run_repair(images, level="quick").removed == [DAMAGED]


def test_a_damaged_shard_is_kept_if_the_file_of_an_image_is_gone_unless_it_is_dropped(site, images, folder, run_repair):
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
    report = run_repair(images, drop=True)
    assert (report.removed, report.lost, report.num_again) == ([DAMAGED], [keys[0]], len(keys) - 1)
    assert f"lost 1 image, whose files were not found: {keys[0]}" in report.text()
    cache = VisionCache.open(folder)
    assert set(cache.keys()) == set(images.path_of) - {keys[0]}
    with pytest.raises(FeaturesMissing):
        cache[keys[0]]
    assert verify(folder).problems == []


def test_a_changed_file_does_not_count_as_its_image(site, images, folder, run_repair):
    key = next(iter(read_receipt(folder, DAMAGED).images))
    site.noise(images.path_of[key].name, seed=99)
    flip(shard_path(folder, DAMAGED))
    assert list(run_repair(images).left) == [DAMAGED]


def test_an_image_that_another_shard_has_is_not_lost(site, images, folder, before, run_repair):
    extend_plan(folder, read_plan(folder), [Shard("shard-00099", read_plan(folder).shards[1].images)])
    receipt_path(folder, DAMAGED).unlink()
    site.build(images)  # builds both
    assert read_receipt(folder, "shard-00099").images.keys() == read_receipt(folder, DAMAGED).images.keys()
    images.path_of[next(iter(read_receipt(folder, DAMAGED).images))].unlink()
    flip(shard_path(folder, DAMAGED))
    report = run_repair(images)
    assert (report.removed, report.lost, report.left) == ([DAMAGED], [], {})


def test_images_that_only_the_plan_names_are_encoded_again(site, images, folder, before, run_repair):
    flip(shard_path(folder, DAMAGED))
    others = {path: key for path, key in images.key_of.items() if key not in read_receipt(folder, DAMAGED).images}
    report = run_repair(replace(images, key_of=others, path_of={key: path for path, key in others.items()}))
    assert report.removed == [DAMAGED] and report.left == {}


def test_files_of_the_run_are_preferred_to_those_of_the_plan(site, images, folder, before, run_repair):
    moved = site.path / "moved"
    moved.mkdir()
    paths = [path.rename(moved / path.name) for path in images.key_of]
    flip(shard_path(folder, DAMAGED))
    assert run_repair(site.index(*paths)).removed == [DAMAGED]


def test_a_quarantined_image_stays_in_quarantine(site, images, run_repair):
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


def test_a_folder_without_shards_and_a_cache_of_another_fingerprint_are_not_repaired(site, images):
    with pytest.raises(CacheError, match="holds no shards to repair; make them with: lookonce cache build"):
        repair(site.folder(), site.fingerprint, images)
    assert not site.folder().exists()
    with pytest.raises(CacheMismatch, match="made with other settings"):
        repair(site.build_once(images), replace(site.fingerprint, tower_sha256="1" * 64), images)


@pytest.mark.parametrize("step", [0, 1])
def test_an_interrupted_repair_can_be_run_again(site, images, folder, before, monkeypatch, step, run_repair):
    flip(shard_path(folder, DAMAGED))
    unlink = Path.unlink
    steps = [shard_path(folder, DAMAGED), receipt_path(folder, DAMAGED)]

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path == steps[step]:
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            repair(folder, site.fingerprint, images)
    assert run_repair(images).removed == [DAMAGED]


def test_a_shard_of_unknown_content_is_not_removed(site, images, folder, before, run_repair):
    """Its receipt is broken, the plan is lost, and its header cannot be read, so nothing names its images."""
    receipt_path(folder, DAMAGED).write_text("{")
    (folder / PLAN).unlink()
    flip(shard_path(folder, DAMAGED), 7)
    report, _ = repair(folder, site.fingerprint, images)
    assert (report.removed, list(report.left)) == ([], [DAMAGED]) and shard_path(folder, DAMAGED).exists()
    assert run_repair(images, drop=True).removed == [DAMAGED]


def test_a_shard_with_a_broken_receipt_is_built_again(site, images, folder, before, run_repair):
    flip(receipt_path(folder, DAMAGED), 3)
    assert run_repair(images).removed == [DAMAGED]
    receipt_path(folder, DAMAGED).write_text("{")
    assert run_repair(images).removed == [DAMAGED]


def test_a_lost_receipt_is_not_damage_and_its_shard_is_not_trusted(site, images, folder, before):
    flip(shard_path(folder, DAMAGED))
    receipt_path(folder, DAMAGED).unlink()
    assert repair(folder, site.fingerprint, images)[0].num_problems == 0
    site.build(images)


def test_a_broken_manifest_is_written_again(site, images, folder, before, run_repair):
    for damage in (lambda path: path.write_text("{"), lambda path: flip(path, 120), Path.unlink):
        damage(folder / MANIFEST)
        assert run_repair(images, provenance={"model": "fake"}).rewritten == [MANIFEST]
        assert json.loads((folder / MANIFEST).read_text())["provenance"]["model"] == "fake"


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("number", [0, 1])
def test_a_plan_that_was_lost_or_broken_names_the_same_files_again(
    site, images, folder, before, run_repair, is_lost, number
):
    new = site.index(*images.key_of, site.noise("new.png", 100))
    site.build(new)
    before |= site.stored()
    planned, stamps = read_plan(folder).files(), site.stamps()
    paths = [plan_path(folder, part) for part in range(number, 2)]
    for path in paths if is_lost else paths[:1]:
        path.unlink() if is_lost else flip(path, 300)
    report = run_repair(new)
    if is_lost and number:  # the first file does not name the second; the next build writes it again
        assert report.num_problems == 0
        site.build(new)
    else:
        names = [PLAN] if is_lost else [path.name for path in paths]
        assert (report.rewritten, report.num_problems, report.removed) == (names, 1, [])
    assert read_plan(folder).files() == planned and site.stamps() == stamps


def test_a_repair_that_is_interrupted_while_it_removes_plan_files_leaves_no_gap(folder, monkeypatch):
    """Later plan files could not be read behind a gap."""
    for number in (1, 2):
        plan_path(folder, number).write_bytes(plan_path(folder, 0).read_bytes())
    plan_path(folder, 0).write_text("{")
    removed, unlink = [], Path.unlink

    def interrupted(path: Path, **options: bool) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(path)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove_broken_plan(folder)
    assert removed == [plan_path(folder, 2)] and len(plan_files(folder)) == 2
