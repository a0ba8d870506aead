"""Encoding: each image has its own features, whatever shares a shard, a tower batch or a decoding process with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lookonce.cache.build import encode as module
from lookonce.cache.build.encode import MAX_ON_DEVICE, DecodeAhead, Encoder, Request
from lookonce.cache.build.progress import planned_images
from lookonce.cache.store.metadata import PlannedImage, Shard
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.images import decode, image_key, read_bytes
from lookonce.errors import ImageError

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


def test_only_the_plan_decides_which_images_share_a_tower_batch(site, images):
    shard = Shard("shard-00000", tuple(planned_images(images, site.processor)))
    keys = []
    for order in (1, -1):
        tower = site.Tower()
        tower.tokens_per_tower_batch = 50
        encoder = Encoder(images.path_of, site.processor, tower, site.fingerprint)
        encoded = list(encoder.run([Shard(shard.name, shard.images[::order])]))
        encoder.close()
        keys.append([[image.key for image in batch.images] for batch in encoded])
        sizes = [tokens for batch in tower.tokens for tokens in batch]
        assert sizes == sorted(image.num_tokens for image in shard.images)
        assert all(len(batch) == 1 or sum(batch) <= 50 for batch in tower.tokens)
        assert 1 < len(tower.tokens) < 8
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


CPU = torch.device("cpu")


@pytest.fixture(params=[0, 2], ids=["here", "in other processes"])
def workers(request, monkeypatch) -> int:
    monkeypatch.setattr(module, "num_workers", lambda device: request.param)
    return request.param


@pytest.fixture
def files(site) -> dict[str, Path]:
    return {image_key(path): path for path in (site.noise(f"{n}.png", n) for n in range(5))}


def requests(files: dict[str, Path]) -> list[Request]:
    planned = [PlannedImage(key, 1, (str(path),)) for key, path in files.items()]
    return [Request((planned[0], planned[1])), Request((planned[2],)), Request((planned[3], planned[4]))]


def test_pixels_come_in_order_and_are_those_of_the_processor(site, files, workers):
    decoder = DecodeAhead(files, site.processor, CPU)
    try:
        for _ in range(2):  # the second time in the same processes
            found = list(decoder.run(iter(requests(files))))
            assert [image.key for decoded in found for image in decoded.images] == list(files)
            pixels = [piece for decoded in found for piece in decoded.on(CPU)]
            expected = [site.processor.resized(decode(read_bytes(path), path), path) for path in files.values()]
            assert all(torch.equal(*pair) for pair in zip(pixels, expected, strict=True))
            assert all(decoded.seconds["decode"] > 0 for decoded in found)
    finally:
        decoder.close()


def test_a_bad_image_is_reported_and_does_not_affect_others(site, files, workers):
    keys = list(files)
    files[keys[0]].unlink()
    site.noise(files[keys[2]].name, 99)
    files[keys[3]].write_text("no image")
    text = image_key(files[keys[3]])
    decoder = DecodeAhead(files | {text: files[keys[3]]}, site.processor, CPU)
    asked = [*requests(files), Request((PlannedImage(text, 0, ()),))]
    found = list(decoder.run(asked))
    decoder.close()
    failed = {key: failure for decoded in found for key, failure in decoded.failed.items()}
    assert {key: failure.retry for key, failure in failed.items()} == {
        keys[0]: True, keys[2]: True, keys[3]: True, text: False
    }  # fmt: skip
    assert "not there" in failed[keys[0]].reason or "No such file" in failed[keys[0]].reason
    assert "has changed" in failed[keys[2]].reason and "unknown image format" in failed[text].reason
    assert [image.key for decoded in found for image in decoded.images] == [keys[1], keys[4]]


def test_archive_members_are_decoded_from_bytes_that_were_already_read(site, files):
    (key, path), *_ = files.items()
    data = path.read_bytes()
    path.unlink()
    decoder = DecodeAhead(files, site.processor, CPU)
    planned = (PlannedImage(key, 1, (str(path),)),)
    [decoded] = decoder.run([Request(planned, {path: data})])
    assert len(decoded.images) == 1
    [decoded] = decoder.run([Request(planned, {path: ImageError("cut short")})])
    assert decoded.failed[key].reason == "cut short" and decoded.failed[key].retry
