"""Repair: what can be put together is, the rest is encoded again, and nothing goes before it can be replaced."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lookonce.cache.maintenance.rebuild import is_confirmed, receipt_of_shard
from lookonce.cache.maintenance.repair import RepairReport, repair
from lookonce.cache.maintenance.verify import verify
from lookonce.cache.store.claims import Claims, Worker
from lookonce.cache.store.index import read_index
from lookonce.cache.store.manifest import MANIFEST, PLAN, extend_plan, plan_path, read_plan
from lookonce.cache.store.plan import Shard
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.receipts import Receipt, finished_shards, read_receipt, receipt_path
from lookonce.cache.store.shards import shard_path
from lookonce.datasets.images import ImageIndex
from lookonce.errors import CacheCorrupt, CacheError, CacheMismatch, FeaturesMissing

DAMAGED = "shard-00001"


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def only(index: ImageIndex, *paths: Path) -> ImageIndex:
    """The images of a run that has these files alone."""
    key_of = {path: index.key_of[path] for path in paths}
    return replace(index, key_of=key_of, path_of={key: path for path, key in key_of.items()})


def mend(site: Any, images: ImageIndex, **options: Any) -> RepairReport:
    """Repair, and build what is to be made again, with a tower only if there is something."""
    report, again = repair(site.folder(), site.fingerprint, images, **options)
    assert len(again.path_of) == report.num_again
    if again.path_of:
        site.build(again)
    json.dumps(asdict(report), default=str)
    return report


@pytest.fixture
def folder(site, images) -> Path:
    site.build(images)
    assert len(finished_shards(site.folder())) > 2
    return site.folder()


@pytest.fixture
def before(site, folder) -> Iterator[dict[str, bytes]]:
    """The features, which are the same again when the test ends."""
    features = site.stored()
    yield features
    assert site.stored() == features
    assert verify(folder).problems == [] and read_index(folder, site.fingerprint.sha256)
    assert site.rubbish() == []


def test_a_sound_cache_is_left_as_it_is(site, images, folder, before):
    stamps = site.stamps()
    report = mend(site, images)
    assert (report.num_problems, report.mended, report.removed, report.left) == (0, [], [], {})
    assert site.stamps() == stamps and "nothing to mend" in report.text()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(flip, id="an image"),
        pytest.param(lambda path: flip(path, 100), id="the header"),
        pytest.param(Path.unlink, id="lost"),
        pytest.param(lambda path: path.write_bytes(b""), id="emptied"),
    ],
)
def test_a_damaged_shard_alone_is_made_again(site, images, folder, before, damage):
    stamps = {path: stamp for path, stamp in site.stamps().items() if DAMAGED not in path.name}
    damage(shard_path(folder, DAMAGED))
    report = mend(site, images)
    assert report.removed == [DAMAGED] and report.num_again == len(read_receipt(folder, DAMAGED).images)
    assert site.stamps().items() >= stamps.items()
    assert f"{report.num_again} images to encode again" in report.text()


def test_quick_repairs_what_quick_finds(site, images, folder, before):
    shard_path(folder, DAMAGED).unlink()
    assert mend(site, images, level="quick").removed == [DAMAGED]


def test_quick_does_not_look_for_flipped_features(site, images, folder):
    flip(shard_path(folder, DAMAGED))
    assert mend(site, images, level="quick").num_problems == 0


def test_a_broken_receipt_of_a_sound_shard_is_written_from_the_shard(site, images, folder, before):
    path, shard = receipt_path(folder, DAMAGED), shard_path(folder, DAMAGED)
    original, content = read_receipt(folder, DAMAGED), path.read_bytes()
    for at in random.Random(0).sample(range(len(content)), 20):
        path.write_bytes(content)
        flip(path, at)
        stamp = shard.stat().st_mtime_ns
        report = mend(site, images)
        if report.removed:  # a checksum was cut by a quotation mark, say: then it can not be told, and is made again
            continue
        assert report.mended == [path.name] and shard.stat().st_mtime_ns == stamp
        assert plain(read_receipt(folder, DAMAGED)) == plain(original)


def plain(receipt: Receipt) -> Receipt:
    """Without what only the receipt knows."""
    images = {key: replace(entry, norms=(), peaks=()) for key, entry in receipt.images.items()}
    return replace(receipt, images=images, host="", finished=0.0, seconds=0.0, failed={})


def test_a_flipped_digit_in_a_checksum_of_a_receipt_does_not_condemn_the_shard(site, images, folder, before):
    path = receipt_path(folder, DAMAGED)
    content = path.read_bytes()
    digits = next(iter(read_receipt(folder, DAMAGED).images.values())).xxh3_64.encode()
    flip(path, content.index(digits) + 3)
    assert mend(site, images).mended == [path.name]


def test_a_broken_receipt_of_a_damaged_shard_is_not_trusted(site, images, folder, before):
    flip(receipt_path(folder, DAMAGED), 3)
    flip(shard_path(folder, DAMAGED))
    assert mend(site, images).removed == [DAMAGED]


def test_a_receipt_that_says_nothing_condemns_the_shard(site, images, folder, before):
    receipt_path(folder, DAMAGED).write_text("{")
    assert mend(site, images).removed == [DAMAGED]


def test_all_receipts_lost_are_written_from_the_shards(site, images, folder, before):
    shutil.rmtree(folder / "receipts")
    (folder / "index.safetensors").unlink()
    shards = {path: path.stat().st_mtime_ns for path in (folder / "shards").iterdir()}
    report = mend(site, images)
    assert report.adopted == finished_shards(folder) and not report.removed
    assert {path: path.stat().st_mtime_ns for path in (folder / "shards").iterdir()} == shards
    assert "only the tower can tell" in report.text()


def test_a_cache_of_shards_alone_comes_back(site, images, folder, before):
    for path in [path for path in folder.iterdir() if path.name != "shards"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    report = mend(site, images, provenance={"model": "fake"})
    assert report.mended == [MANIFEST, PLAN] and len(report.adopted) > 2
    assert json.loads((folder / MANIFEST).read_text())["provenance"]["model"] == "fake"


def test_of_shards_without_receipts_only_whole_ones_of_this_cache_are_taken(site, images, folder, before):
    shutil.rmtree(folder / "receipts")
    path = shard_path(folder, DAMAGED)
    path.write_bytes(path.read_bytes()[:-1])
    report = mend(site, images)
    assert DAMAGED not in report.adopted and len(report.adopted) > 1
    site.build(images)


def test_one_lost_receipt_is_no_damage_and_its_shard_is_not_trusted(site, images, folder, before):
    flip(shard_path(folder, DAMAGED))
    receipt_path(folder, DAMAGED).unlink()
    report = mend(site, images)
    assert (report.num_problems, report.adopted) == (0, [])
    site.build(images)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_receipts_of_every_dtype_come_back_from_shards(site, images, dtype):
    compute = site.use(dtype)
    site.build(images, lambda: site.Tower(dtype=compute))
    for name in finished_shards(site.folder()):
        receipt = receipt_of_shard(site.folder(), name, site.fingerprint)
        assert plain(receipt) == plain(read_receipt(site.folder(), name))
        assert is_confirmed(receipt, receipt_path(site.folder(), name).read_bytes())


def test_a_shard_of_another_cache_makes_no_receipt(site, images, folder):
    with pytest.raises(CacheCorrupt, match=f"{DAMAGED}.safetensors is no whole shard of this cache"):
        receipt_of_shard(folder, DAMAGED, replace(site.fingerprint, tower_sha256="1" * 64))


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", b"\xff" * 8, (2).to_bytes(8, "little") + b"{}", (4).to_bytes(8, "little") + b"null", bytes(4096)],
)
def test_what_is_no_shard_makes_no_receipt(site, images, folder, content):
    shard_path(folder, DAMAGED).write_bytes(content)
    with pytest.raises(CacheCorrupt, match="is broken"):
        receipt_of_shard(folder, DAMAGED, site.fingerprint)


def test_an_image_that_is_nowhere_keeps_its_damaged_shard_and_is_named(site, images, folder):
    keys = sorted(read_receipt(folder, DAMAGED).images)
    images.path_of[keys[0]].unlink()
    flip(shard_path(folder, DAMAGED))
    stamps = site.stamps()
    report = mend(site, images)
    assert list(report.left) == [DAMAGED] and not report.removed
    assert f"1 of its {len(keys)} images can not be had again: {keys[0]}" in report.text() and "--drop" in report.text()
    assert site.stamps() == stamps
    assert {key for key in images.path_of if key in VisionCache.open(folder)} == set(images.path_of)


def test_drop_removes_it_and_counts_what_is_lost(site, images, folder):
    keys = sorted(read_receipt(folder, DAMAGED).images)
    images.path_of[keys[0]].unlink()
    flip(shard_path(folder, DAMAGED))
    report = mend(site, images, drop=True)
    assert (report.removed, report.lost, report.num_again) == ([DAMAGED], [keys[0]], len(keys) - 1)
    assert f"lost 1 image, nowhere to be had again: {keys[0]}" in report.text()
    cache = VisionCache.open(folder)
    assert set(cache.keys()) == set(images.path_of) - {keys[0]}
    with pytest.raises(FeaturesMissing):
        cache[keys[0]]
    assert verify(folder).problems == []


def test_an_image_that_has_changed_is_not_taken_for_itself(site, images, folder):
    key = next(iter(read_receipt(folder, DAMAGED).images))
    site.noise(images.path_of[key].name, seed=99)
    flip(shard_path(folder, DAMAGED))
    assert list(mend(site, images).left) == [DAMAGED]


def test_an_image_that_another_shard_holds_is_not_lost(site, images, folder, before):
    extend_plan(folder, read_plan(folder), [Shard("shard-00099", read_plan(folder).shards[1].images)])
    receipt_path(folder, DAMAGED).unlink()
    site.build(images)  # makes both
    assert read_receipt(folder, "shard-00099").images.keys() == read_receipt(folder, DAMAGED).images.keys()
    images.path_of[next(iter(read_receipt(folder, DAMAGED).images))].unlink()
    flip(shard_path(folder, DAMAGED))
    report = mend(site, images)
    assert (report.removed, report.lost, report.left) == ([DAMAGED], [], {})


def test_images_that_only_the_plan_names_are_made_again(site, images, folder, before):
    flip(shard_path(folder, DAMAGED))
    foreign = [path for path, key in images.key_of.items() if key not in read_receipt(folder, DAMAGED).images]
    report = mend(site, only(images, *foreign))
    assert report.removed == [DAMAGED] and report.left == {}


def test_files_of_the_run_are_preferred_to_those_of_the_plan(site, images, folder, before):
    moved = site.path / "moved"
    moved.mkdir()
    paths = [path.rename(moved / path.name) for path in images.key_of]
    flip(shard_path(folder, DAMAGED))
    assert mend(site, site.index(*paths)).removed == [DAMAGED]


def test_a_quarantined_image_stays_in_quarantine(site, images):
    (site.path / "bad.png").write_text("no image")
    index = site.index(*images.key_of, site.path / "bad.png")
    site.build(index)
    [(shard, failed)] = [
        (name, receipt.failed)
        for name in finished_shards(site.folder())
        if (receipt := read_receipt(site.folder(), name)).failed
    ]
    flip(shard_path(site.folder(), shard))
    mend(site, index)
    assert VisionCache.open(site.folder()).failed.keys() == failed.keys()
    (site.path / "bad.png").unlink()  # it is not needed to replace the shard
    flip(shard_path(site.folder(), shard))
    assert mend(site, index).removed == [shard]


def test_what_a_living_worker_has_in_work_is_not_touched(site, images, folder):
    flip(shard_path(folder, DAMAGED))
    flip(receipt_path(folder, "shard-00002"), 3)
    stamps = site.stamps()
    with Claims(folder, Worker.this_process()) as claims:
        taken = [claims.take(name, 1) for name in (DAMAGED, "shard-00002")]
        report = mend(site, images)
        assert all(taken) and site.stamps() == stamps
    assert report.left == {name: "a worker has it in work" for name in (DAMAGED, "shard-00002")}


def test_a_broken_manifest_is_written_anew(site, images, folder, before):
    for damage in (lambda path: path.write_text("{"), lambda path: flip(path, 120), Path.unlink):
        damage(folder / MANIFEST)
        assert mend(site, images).mended == [MANIFEST]


def test_a_cache_of_another_fingerprint_is_not_repaired(site, images, folder):
    with pytest.raises(CacheMismatch, match="made from something else"):
        repair(folder, replace(site.fingerprint, tower_sha256="1" * 64), images)


def test_where_there_is_no_cache_there_is_nothing_to_repair(site, images):
    with pytest.raises(CacheError, match="holds no shards to repair; make them with: lookonce cache build"):
        repair(site.folder(), site.fingerprint, images)
    assert not site.folder().exists()


def test_a_broken_plan_is_written_anew_from_the_receipts(site, images, folder, before):
    planned = read_plan(folder)
    flip(folder / PLAN, 300)
    report = mend(site, images)
    assert report.mended == [PLAN]
    after = read_plan(folder)
    assert [(shard.name, set(shard.keys), shard.num_tokens) for shard in after.shards] == [
        (shard.name, set(shard.keys), shard.num_tokens) for shard in planned.shards
    ]
    assert {image.files for image in after.images()} == {image.files for image in planned.images()}


def test_each_part_of_a_plan_keeps_its_place(site, images, folder, before):
    new = site.index(*images.key_of, *(site.noise(f"new-{number}.png", 100 + number) for number in range(2)))
    site.build(new)
    before |= site.stored()
    planned = read_plan(folder)
    assert planned.num_parts == 2
    content = [plan_path(folder, part).read_bytes() for part in range(2)]
    for damage, parts in itertools.product((lambda path: flip(path, 100), Path.unlink), ((0,), (1,), (0, 1))):
        for part in range(2):
            plan_path(folder, part).write_bytes(content[part])
        for part in parts:
            damage(plan_path(folder, part))
        assert mend(site, new).num_problems == 1
        assert [shard.name for shard in read_plan(folder).shards] == [shard.name for shard in planned.shards]


def test_a_lost_plan_is_written_anew_from_the_receipts(site, images, folder, before):
    planned = read_plan(folder)
    (folder / PLAN).unlink()
    report = mend(site, images)
    assert (report.mended, report.num_problems, report.left) == ([PLAN], 1, {})
    after = read_plan(folder)
    assert [(shard.name, set(shard.keys)) for shard in after.shards] == [
        (shard.name, set(shard.keys)) for shard in planned.shards
    ]
    assert {image.files for image in after.images()} == {image.files for image in planned.images()}


def test_a_plan_with_unfinished_shards_gives_them_back_as_work(site, images, folder, before):
    receipt_path(folder, DAMAGED).unlink()
    shard_path(folder, DAMAGED).unlink()
    flip(folder / PLAN, 100)
    mend(site, images)
    assert read_plan(folder).shards[1] == Shard(DAMAGED, ())
    site.build(images)


def test_a_plan_is_not_mended_under_a_living_worker(site, images, folder):
    flip(folder / PLAN, 100)
    content = (folder / PLAN).read_bytes()
    with Claims(folder, Worker.this_process()) as claims:
        assert claims.take("shard-00009", 1)
        report = mend(site, images)
    assert list(report.left) == ["the plan"] and (folder / PLAN).read_bytes() == content


def test_everything_at_once(site, images, folder, before):
    flip(folder / MANIFEST, 120)
    flip(folder / PLAN, 100)
    flip(folder / "index.safetensors", 500)
    flip(receipt_path(folder, "shard-00000"), 3)
    flip(shard_path(folder, DAMAGED))
    report = mend(site, images)
    assert (sorted(report.mended), report.removed) == ([MANIFEST, PLAN, "shard-00000.json"], [DAMAGED])


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_repair_that_was_interrupted_is_gone_on_with(site, images, folder, before, monkeypatch, step):
    flip(shard_path(folder, DAMAGED))
    unlink, steps = (
        Path.unlink,
        [folder / "index.safetensors", shard_path(folder, DAMAGED), receipt_path(folder, DAMAGED)],
    )

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path == steps[step]:
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            repair(folder, site.fingerprint, images)
    assert mend(site, images).removed == [DAMAGED]


def test_a_damaged_shard_of_a_lost_plan_is_made_again(site, images, folder, before):
    (folder / PLAN).unlink()
    flip(shard_path(folder, DAMAGED))
    assert mend(site, images).removed == [DAMAGED]


def test_a_shard_of_unknown_content_is_not_removed(site, images, folder, before):
    """Its receipt is broken, no plan knows it, and its header can not be read: who knows what would be lost."""
    good = {path: path.read_bytes() for path in (receipt_path(folder, DAMAGED), shard_path(folder, DAMAGED))}
    (folder / PLAN).unlink()
    receipt_path(folder, DAMAGED).write_text("{")
    flip(shard_path(folder, DAMAGED))  # the header still tells
    assert mend(site, images).removed == [DAMAGED]
    for path, content in good.items():
        path.write_bytes(content)
    receipt_path(folder, DAMAGED).write_text("{")
    (folder / PLAN).unlink()
    flip(shard_path(folder, DAMAGED), 7)
    report = mend(site, images)
    assert (report.removed, list(report.left)) == ([], [DAMAGED]) and shard_path(folder, DAMAGED).exists()
    assert mend(site, images, drop=True).removed == [DAMAGED]
    site.build(images)


def test_a_shard_that_another_has_mended_meanwhile_is_kept(site, images, folder, before, monkeypatch):
    sound = shard_path(folder, DAMAGED).read_bytes()
    flip(shard_path(folder, DAMAGED))
    really_verify = verify

    def slow_verify(*args):
        report = really_verify(*args)
        shard_path(folder, DAMAGED).write_bytes(sound)
        return report

    monkeypatch.setattr("lookonce.cache.maintenance.repair.verify", slow_verify)
    report = mend(site, images)
    assert (report.num_problems, report.removed, report.left) == (1, [], {})
