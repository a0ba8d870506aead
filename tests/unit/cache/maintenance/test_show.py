"""Show: an image is found by file, key or first digits, and shown with the statistics of its receipt."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest
from support.small_caches import flip

from lookonce.cache.maintenance.show import show
from lookonce.cache.store.metadata import PlannedImage, Shard, extend_plan, read_plan, read_receipt
from lookonce.cache.store.reader import VisionCache
from lookonce.cache.store.shards import shard_path
from lookonce.errors import UsageError


@pytest.fixture
def cache(folder_with_quarantine):
    return VisionCache.open(folder_with_quarantine)


def plan_also(cache: VisionCache, *planned: PlannedImage) -> None:
    """Plan a shard of more images."""
    extend_plan(cache.folder, read_plan(cache.folder), [Shard("shard-00099", planned)])


@pytest.mark.parametrize("digits", [64, 40, 16, 12, 4])
def test_an_image_is_found_by_its_key_and_by_first_digits(cache, images, digits):
    for key in images.path_of:
        assert show(cache, key[:digits]).key == show(cache, key[:digits].upper()).key == key


def test_an_image_is_found_by_its_file_even_if_that_was_copied_or_is_gone(cache, images, tmp_path, monkeypatch):
    path, key = next(iter(images.key_of.items()))
    (tmp_path / "other").mkdir()
    shutil.copy(path, tmp_path / "other" / "copy.png")
    monkeypatch.chdir(path.parent)
    assert {show(cache, name).key for name in (str(path), path.name, "other/copy.png")} == {key}
    path.unlink()
    monkeypatch.chdir("/")
    assert {show(cache, name).key for name in (str(path), path.name, f"{path.parent.name}/{path.name}")} == {key}


def test_an_intact_image_has_the_statistics_of_its_receipt(cache, images):
    for path, key in images.key_of.items():
        report = show(cache, key)
        shard, entry = cache.entry(key)
        assert (report.state, report.files, report.shard) == ("encoded", [str(path)], shard)
        assert (report.offset, report.size_bytes, report.grid_thw) == (entry.offset, entry.size_bytes, entry.grid_thw)
        assert report.checksum_ok and report.num_tokens == len(cache[key])
        stored = read_receipt(cache.folder, shard).images[key]
        norms = cache[key].norm(dim=-1).mean(0).tolist()
        assert (report.norms, report.peaks) == (stored.norms, stored.peaks) and norms == pytest.approx(
            report.norms, 1e-3
        )
        assert str(path) in report.text() and "checksum  ok" in report.text()
        json.dumps(asdict(report), default=str)


def test_a_damaged_image_is_reported(cache, images):
    key = next(iter(images.path_of))
    shard, entry = cache.entry(key)
    flip(shard_path(cache.folder, shard), entry.offset)
    report = show(VisionCache.open(cache.folder), key)
    assert report.checksum_ok is False and "WRONG; run: lookonce cache repair RUN.yaml" in report.text()


def test_a_quarantined_image_is_shown_with_its_reason_and_a_planned_one_with_its_shard(cache, site):
    report = show(cache, str(site.path / "bad.png"))
    assert report.state == "quarantined" and "unknown image format" in report.reason
    assert show(cache, report.key[:8]) == report and report.reason in report.text()
    plan_also(cache, PlannedImage("f" * 64, 1, ("x.png",)))
    report = show(cache, "f" * 12)
    assert (report.state, report.shard, report.files) == ("planned", "shard-00099", ["x.png"])
    assert "lookonce cache build" in report.text()


def test_several_candidates_are_listed_with_their_files(cache):
    keys = ["ab" * 32, "ab" * 31 + "cd"]
    plan_also(cache, *(PlannedImage(key, 1, (f"{key[-2:]}.png",)) for key in keys))
    with pytest.raises(UsageError, match="matches 2 images; give more of the name or key") as caught:
        show(cache, "abab")
    assert all(f"{key}  {key[-2:]}.png" in str(caught.value) for key in keys)
    assert show(cache, keys[0]).key == keys[0]


@pytest.mark.parametrize("name", ["0" * 64, "0" * 8, "abc", "nothing.png", "a/b/c.png", "", "zz", "archive.tar/x.png"])
def test_an_unknown_image_is_refused(cache, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="has no image"):
        show(cache, name)


def test_a_changed_file_is_reported_with_its_former_key(cache, site, images):
    path, key = next(iter(images.key_of.items()))
    site.noise(path.name, seed=99)
    with pytest.raises(UsageError, match=f"the file was image {key} when it was planned; encode it with"):
        show(cache, str(path))
