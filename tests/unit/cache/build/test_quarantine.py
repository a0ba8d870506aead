"""Images that cannot be encoded: reported with the reason, retried where that may help, without harm to others."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from lookonce.cache.build.encode import MAX_UNREAD
from lookonce.cache.store.metadata import read_plan, read_receipts, receipt_path
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import ImageIndex
from lookonce.errors import FeaturesMissing, ImageError

NUM_IMAGES = 8


@pytest.fixture
def bad(site):
    """A file that is not an image."""
    (site.path / "bad.jpg").write_text("no image")
    return site.path / "bad.jpg"


def keys_of(images: ImageIndex, *paths):
    return {images.key_of[path] for path in paths}


def failures(site):
    """The failures in the receipts, by shard."""
    return {receipt.shard: receipt.failed for receipt in read_receipts(site.folder()) if receipt.failed}


def test_a_bad_image_is_reported_everywhere_and_all_others_are_encoded(site, images, bad):
    more = site.index(*images.key_of, bad)
    [key] = keys_of(more, bad)
    report = site.build(more)
    assert (report.num_encoded, report.num_wanted, report.num_missing) == (NUM_IMAGES, NUM_IMAGES + 1, 0)
    assert site.stored().keys() == images.path_of.keys()
    reason = f"cannot decode image {bad}: unknown image format"
    assert report.quarantined == {key: reason}
    assert site.quarantine() == [{"key": key, "file": str(bad), "reason": reason}]
    [(_, failed)] = failures(site).items()
    assert (failed[key].reason, failed[key].file, failed[key].retry) == (reason, str(bad), False)
    with pytest.raises(FeaturesMissing, match=f"{key}.*quarantined: {reason}"):
        VisionCache.open(site.folder())[key]


@pytest.mark.parametrize("tokens_per_tower_batch", [1, 10**6])
def test_only_images_with_features_that_are_not_finite_are_quarantined(site, images, tokens_per_tower_batch):
    white = site.path / "white.png"
    Image.new("RGB", (64, 64), "white").save(white)  # the fake tower gives NaN
    tower = site.Tower()
    tower.tokens_per_tower_batch = tokens_per_tower_batch
    more = site.index(*images.key_of, white)
    report = site.build(more, tower, shard_bytes=10**9)
    assert report.quarantined == dict.fromkeys(keys_of(more, white), f"the tower's features of {white} are not finite")
    site.build(images, root="undisturbed", shard_bytes=10**9)
    assert site.stored() == site.stored("undisturbed")


def test_a_bad_image_is_not_retried_but_reported_again(site, images, bad):
    more = site.index(*images.key_of, bad)
    first = site.build(more)
    before, lines = site.stamps(), site.quarantine()
    second = site.build(more, site.no_tower)
    assert second.quarantined == first.quarantined
    assert (site.stamps(), site.quarantine()) == (before, lines)


def test_a_bad_image_is_retried_on_request(site, images, bad):
    more = site.index(*images.key_of, bad)
    before = site.build(more)
    kept = site.stamps()
    after = site.build(more, retry_quarantined=True)
    assert after.quarantined == before.quarantined
    assert (after.num_encoded, after.num_reused) == (0, NUM_IMAGES)
    assert after.num_shards == before.num_shards + 1
    assert site.stamps().items() >= kept.items()
    assert len(site.quarantine()) == 1


def test_features_that_become_finite_are_stored_after_a_retry(site):
    white = site.path / "white.png"
    Image.new("RGB", (64, 64), "white").save(white)
    images = site.index(white)
    assert site.build(images).quarantined
    fixed = site.Tower()
    fixed.encode = lambda patches, grids: patches.view(-1, 4, patches.shape[1])
    report = site.build(images, fixed, retry_quarantined=True)
    assert (report.num_encoded, report.quarantined) == (1, {})
    assert site.stored().keys() == images.path_of.keys()
    assert site.quarantine() == []


def test_a_corrected_file_is_another_image_and_is_encoded(site, bad):
    assert site.build(site.index(bad)).quarantined
    Image.new("RGB", (64, 64)).save(bad)
    report = site.build(site.index(bad))
    assert (report.num_encoded, report.quarantined) == (1, {})


def test_a_cache_of_only_bad_images_is_complete(site, bad):
    report = site.build(site.index(bad))
    assert (report.num_encoded, report.num_missing, report.num_shards) == (0, 0, 1)
    assert len(VisionCache.open(site.folder())) == 0
    site.build(site.index(bad), site.no_tower)


# Files that cannot be read: another build may find them.


def lose(path):
    path.unlink()
    return f"cannot read image {path}: No such file or directory"


def change(path):
    path.write_bytes(path.read_bytes() + b" ")
    return f"image {path} has changed since it was hashed"


@pytest.mark.parametrize("harm", [lose, change])
def test_an_image_that_was_lost_or_changed_meanwhile_is_reported_and_retried(site, images, harm):
    [path, *_] = images.path_of.values()
    content = path.read_bytes()
    [key] = keys_of(images, path)
    reason = harm(path)
    report = site.build(images)
    assert (report.num_encoded, report.quarantined) == (NUM_IMAGES - 1, {key: reason})
    [(_, failed)] = failures(site).items()
    assert failed[key].retry
    assert site.quarantine() == [{"key": key, "file": str(path), "reason": reason}]

    path.write_bytes(content)
    again = site.build(images)
    assert (again.num_encoded, again.num_reused, again.quarantined) == (1, NUM_IMAGES - 1, {})
    assert site.stored().keys() == images.path_of.keys()
    assert site.quarantine() == []
    site.build(images, site.no_tower)


def test_a_changed_image_is_encoded_as_it_is_now_when_hashed_again(site, images):
    [path, *_] = images.path_of.values()
    site.noise(path.name, 12345)
    assert site.build(images).quarantined
    report = site.build(site.index(*images.key_of))
    assert (report.num_encoded, report.quarantined) == (1, {})
    assert len(site.stored()) == NUM_IMAGES


def test_an_unreadable_file_is_reported_without_a_key(site, images, tmp_path):
    more = site.index(*images.key_of, tmp_path / "absent.jpg")
    reason = f"cannot read image {tmp_path / 'absent.jpg'}: No such file or directory"
    for _ in range(2):
        report = site.build(more)
        assert report.quarantined == {str(tmp_path / "absent.jpg"): reason}
        assert (report.num_wanted, report.num_missing) == (NUM_IMAGES, 0)
        assert site.quarantine() == [{"key": None, "file": str(tmp_path / "absent.jpg"), "reason": reason}]
    assert not site.build(images).quarantined and not site.quarantine()


@pytest.mark.parametrize("tokens_per_tower_batch", [1, 20, 10**6])
def test_a_lost_disk_stops_the_build_instead_of_quarantining_all_images(site, tokens_per_tower_batch):
    paths = [site.noise(f"{number}.png", number, (64, 64)) for number in range(3 * MAX_UNREAD)]
    images, tower = site.index(*paths), site.Tower()
    tower.tokens_per_tower_batch = tokens_per_tower_batch
    content = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.unlink()
    with pytest.raises(ImageError, match=r"most images of shard-00000 cannot be read; the last one: .*\.png"):
        site.build(images, tower, shard_bytes=10**9)
    assert not site.stored() and not site.leftovers()
    for path in paths:
        path.write_bytes(content[path])
    assert site.build(images, tower, shard_bytes=10**9).num_encoded == len(paths)


@pytest.mark.parametrize("tokens_per_tower_batch", [1, 10**6])
def test_some_lost_images_do_not_stop_a_build_of_several_shards(site, tokens_per_tower_batch):
    paths = [site.noise(f"{number}.png", number, (64, 64)) for number in range(24)]
    images, tower = site.index(*paths), site.Tower()
    tower.tokens_per_tower_batch = tokens_per_tower_batch
    for path in list(images.path_of.values())[::2]:
        path.unlink()
    bytes_per_image = 4 * site.fingerprint.bytes_per_token
    report = site.build(images, tower, shard_bytes=6 * bytes_per_image)
    assert (report.num_shards, report.num_encoded, len(report.quarantined)) == (4, 12, 12)


# The summary in quarantine.jsonl.


def test_a_shard_that_is_built_again_has_its_failures_once(site, images, bad):
    more = site.index(*images.key_of, bad)
    site.build(more)
    for shard in read_plan(site.folder()).shards:
        receipt_path(site.folder(), shard.name).unlink()
    site.build(more)
    assert len(site.quarantine()) == 1


def test_the_summary_is_made_from_receipts_and_may_be_deleted_or_edited(site, images, bad):
    more = site.index(*images.key_of, bad)
    site.build(more)
    lines = site.quarantine()
    for content in ("", "garbage\n", json.dumps({"key": "f" * 64, "file": "a", "reason": "b"}) + "\n"):
        (site.folder() / "quarantine.jsonl").write_text(content)
        assert VisionCache.open(site.folder()).failed.keys() == keys_of(more, bad)
        assert site.build(more, site.no_tower).quarantined
        assert site.quarantine() == lines
