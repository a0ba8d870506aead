"""Encoding: each image has its own features, whatever shares a shard or a tower batch with it."""

from __future__ import annotations

import pytest
import torch

from lookonce.cache.build.encode import MAX_ON_DEVICE, Encoder
from lookonce.cache.build.progress import planned_images
from lookonce.cache.store.metadata import Shard
from lookonce.cache.store.reader import VisionCache

DTYPES = ["float32", "bfloat16", "fp8_e4m3"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens_per_tower_batch", [1, 60, 10**6])
def test_each_image_gets_its_own_features_in_tower_batches_of_any_size(site, images, dtype, tokens_per_tower_batch):
    compute = site.use(dtype)
    tower = site.Tower(dtype=compute)
    tower.tokens_per_tower_batch = tokens_per_tower_batch
    assert site.build(images, tower, shard_bytes=10**9).num_encoded == 8
    cache = VisionCache.open(site.folder())
    for key, path in images.path_of.items():
        patches, grid = site.processor.read(path)
        storage = site.fingerprint.storage
        stored, *scale = storage.quantize(patches.to(compute).view(-1, 4, patches.shape[1]))
        assert torch.equal(cache[key], storage.dequantize(stored, scale[0] if scale else None))
        assert cache.grid_thw(key) == grid


class RecordingTower:
    """Records the tokens of the images of each tower batch."""

    def __init__(self, tower):
        self.__dict__ |= {name: getattr(tower, name) for name in ("device", "dtype", "merge_size", "encode")}
        self.batches, self._encode, self.encode = [], tower.encode, self.record
        self.tokens_per_tower_batch = 50

    def record(self, patches, grids):
        self.batches.append([t * h * w // 4 for t, h, w in grids])
        return self._encode(patches, grids)


def test_only_the_plan_decides_which_images_share_a_tower_batch(site, images):
    shard = Shard("shard-00000", tuple(planned_images(images, site.processor)))
    keys = []
    for order in (1, -1):
        tower = RecordingTower(site.Tower())
        encoder = Encoder(images.path_of, site.processor, tower, site.fingerprint)
        encoded = list(encoder.run([Shard(shard.name, shard.images[::order])]))
        encoder.close()
        keys.append([[image.key for image in batch.images] for batch in encoded])
        sizes = [tokens for batch in tower.batches for tokens in batch]
        assert sizes == sorted(image.num_tokens for image in shard.images)
        assert all(len(batch) == 1 or sum(batch) <= 50 for batch in tower.batches)
        assert 1 < len(tower.batches) < 8
        assert [batch.is_last for batch in encoded] == [False] * (len(encoded) - 1) + [True]
    assert keys[0] == keys[1]


def test_shards_are_drawn_only_when_their_images_can_be_decoded(site):
    images = site.index(*(site.noise(f"{number}.png", number, (64, 64)) for number in range(20)))
    shards = [Shard(f"shard-{n:05d}", (image,)) for n, image in enumerate(planned_images(images, site.processor))]
    drawn, tower = [], site.Tower()
    encoder = Encoder(images.path_of, site.processor, tower, site.fingerprint)
    for number, batch in enumerate(encoder.run(shard for shard in shards if drawn.append(shard.name) is None)):
        assert batch.shard.name == shards[number].name
        assert len(drawn) <= number + 1 + MAX_ON_DEVICE
    encoder.close()
    assert len(drawn) == len(shards)


def test_seconds_are_reported_by_kind_of_work(site, images):
    phases = site.build(images).phases
    assert phases.keys() >= {"read", "decode", "resize", "tower", "pack", "flush", "wait for the disk"}
    assert all(seconds >= 0 for seconds in phases.values())
