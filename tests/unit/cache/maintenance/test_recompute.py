"""Recompute: features that differ from the tower's are found, although their checksums are right."""

from __future__ import annotations

import pytest
import torch

from lookonce.cache.maintenance.recompute import TOLERANCE, recompute, relative_errors
from lookonce.cache.store.shards import shard_path
from lookonce.errors import CacheError, CacheMismatch


def recompute_images(site, images, tower=None, num_images=100, seed=0, fingerprint=None):
    tower = tower or site.Tower()
    where = site.folder(), fingerprint or site.fingerprint
    return recompute(*where, images.path_of, site.processor, tower, num_images, seed)


class Slightly:
    """A tower whose features of one level are larger by a factor."""

    def __init__(self, tower, factor, level=0):
        self._tower, self._factor, self._level = tower, factor, level

    def __getattr__(self, name):
        return getattr(self._tower, name)

    def encode(self, patches, grids):
        features = self._tower.encode(patches, grids).clone()
        features[:, self._level] *= self._factor
        return features


def test_features_of_the_same_tower_are_bit_for_bit_equal(site, images):
    site.build_once(images)
    report = recompute_images(site, images)
    assert (report.num_compared, report.num_skipped, report.worst_error, report.problems) == (8, 0, 0.0, [])
    assert report.errors.keys() == images.path_of.keys()
    assert all(errors == [0.0] * 4 for errors in report.errors.values())
    assert "8 images encoded again" in report.text() and "bit for bit equal" in report.text()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_difference_is_measured_for_each_level_and_judged_by_the_dtype(site, images, dtype):
    compute = site.use(dtype)
    site.build(images, lambda: site.Tower(dtype=compute))
    tower = site.Tower(dtype=compute)
    small = recompute_images(site, images, Slightly(tower, 1 + TOLERANCE[dtype] / 4, level=2))
    assert small.problems == []
    report = recompute_images(site, images, Slightly(tower, 1 + 4 * TOLERANCE[dtype], level=2))
    assert {(problem.image, problem.part) for problem in report.problems} == {(key, "image") for key in images.path_of}
    assert all("level 2 has a relative error of" in problem.what and problem.file for problem in report.problems)
    assert report.worst_error == max(report.errors[report.worst_image]) > TOLERANCE[dtype]
    assert f"in level 2 of image {report.worst_image}" in report.text()


def test_features_of_another_image_are_found(site, images, monkeypatch):
    class Mixed(site.Tower):
        """A tower whose batches mix up their images."""

        def encode(self, patches, grids):
            return super().encode(patches.flip(0), grids)

    site.build(images, Mixed)
    assert {problem.image for problem in recompute_images(site, images).problems} == images.path_of.keys()


def test_changed_and_missing_files_are_skipped_and_counted(site, images):
    site.build_once(images)
    changed, gone, *_ = images.path_of.values()
    site.noise(changed.name, seed=99)
    gone.unlink()
    report = recompute_images(site, images)
    assert (report.num_compared, report.num_skipped, report.problems) == (6, 2, [])
    assert "2 skipped (file gone or changed)" in report.text()


def test_a_seed_draws_the_same_images_and_another_seed_others(site, images):
    site.build_once(images)
    draws = [set(recompute_images(site, images, num_images=3, seed=seed).errors) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2] and len(draws[0]) == 3


def test_damaged_bytes_are_a_problem_like_others(site, images):
    site.build_once(images)
    path = shard_path(site.folder(), "shard-00000")
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    report = recompute_images(site, images)
    [problem] = report.problems
    assert problem.shard == "shard-00000" and "checksum" in problem.what and report.num_compared == 7


def test_features_of_another_shape_have_an_infinite_error(site, images, monkeypatch):
    site.build_once(images)
    monkeypatch.setattr(type(site.processor), "read", lambda self, path: (torch.zeros(16, 1536), (1, 4, 4)))
    report = recompute_images(site, images, num_images=1)
    assert report.worst_error == float("inf") and report.problems


def test_another_fingerprint_or_a_missing_cache_is_refused(site, images):
    with pytest.raises(CacheError, match="is not a cache"):
        recompute_images(site, images)
    site.build_once(images)
    mine = site.fingerprint
    site.use("bfloat16")
    theirs, site.fingerprint = site.fingerprint, mine
    with pytest.raises(CacheMismatch, match="dtype"):
        recompute_images(site, images, fingerprint=theirs)


def test_errors_are_norms_of_differences_over_norms():
    expected = torch.tensor([[[3.0, 0.0], [0.0, 0.0]], [[0.0, 4.0], [0.0, 0.0]]])  # two tokens, two levels
    found = expected + torch.tensor([[[0.0, 0.5], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    assert relative_errors(found, expected) == [pytest.approx(0.1), 0.0]


@pytest.mark.parametrize(
    ("num_skipped", "reason"),
    [
        (0, ", the cache has none of the run's; encode them with: lookonce cache build"),
        (8, ", 8 skipped (file gone or changed)"),
    ],
)
def test_the_text_says_why_no_image_was_compared(site, images, num_skipped, reason):
    site.build_once(images)
    if num_skipped:
        for path in images.path_of.values():
            path.unlink()
    report = recompute_images(site, images if num_skipped else site.index(site.noise("new.png", 77)))
    compared = (report.num_compared, report.num_skipped, report.worst_image, report.problems)
    assert compared == (0, num_skipped, "", [])
    assert f"no image compared{reason}" in report.text() and "equal" not in report.text()
