"""Verify finds every flipped bit of a shard, and the image that it belongs to."""

from __future__ import annotations

import random

import pytest

from lookonce.cache.maintenance.verify import regions, verify
from lookonce.cache.store.metadata import finished_shards, read_receipt
from lookonce.cache.store.shards import shard_path

pytestmark = [
    pytest.mark.usefixtures("no_fsync"),
    pytest.mark.guarantee("Every flipped byte of a shard is found and named."),
]

NUM_FLIPS = 200


@pytest.fixture
def folder(site, images):
    (site.path / "bad.png").write_text("no image")
    return site.build_once(site.index(*images.key_of, site.path / "bad.png"))


def flip(path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def test_each_of_200_flipped_bits_is_found_and_traced_to_its_shard_and_image(folder):
    rng = random.Random(0)
    names = finished_shards(folder)
    regions_of = {name: regions(read_receipt(folder, name)) for name in names}
    seen = set()
    for _ in range(NUM_FLIPS):
        name, bit = rng.choice(names), rng.randrange(8)
        at = rng.randrange(shard_path(folder, name).stat().st_size)
        [region] = [part for part in regions_of[name] if part.offset <= at < part.offset + part.size_bytes]
        flip(shard_path(folder, name), at, bit)
        [problem] = verify(folder).problems
        assert (problem.shard, problem.image) == (name, region.key)
        assert problem.part == "image" if region.key else "header" in problem.what
        assert bool(problem.file) == bool(region.key)
        flip(shard_path(folder, name), at, bit)
        seen.add((name, region.key))
    assert verify(folder).problems == []
    assert {name for name, _ in seen} == set(names) and any(not key for _, key in seen)
