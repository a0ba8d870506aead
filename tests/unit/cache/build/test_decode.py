"""Decoding ahead: the same pixels in this process and in others, in order, whatever is wrong with some images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lookonce.cache.build import encode as module
from lookonce.cache.build.encode import DecodeAhead, DecodedBatch, Request
from lookonce.cache.store.metadata import PlannedImage
from lookonce.datasets.images import image_key
from lookonce.errors import ImageError

CPU = torch.device("cpu")


@pytest.fixture(params=[0, 2], ids=["here", "in other processes"])
def workers(request, monkeypatch) -> int:
    monkeypatch.setattr(module, "num_workers", lambda device: request.param)
    return request.param


@pytest.fixture
def images(site) -> dict[str, Path]:
    return {image_key(path): path for path in (site.noise(f"{n}.png", n) for n in range(5))}


def requests(images: dict[str, Path]) -> list[Request]:
    planned = [PlannedImage(key, 1, (str(path),)) for key, path in images.items()]
    return [Request((planned[0], planned[1])), Request((planned[2],)), Request((planned[3], planned[4]))]


def test_pixels_come_in_order_and_are_those_of_the_processor(site, images, workers):
    decoder = DecodeAhead(images, site.processor, CPU)
    try:
        for _ in range(2):  # the second time in the same processes
            found = list(decoder.run(iter(requests(images))))
            assert [image.key for decoded in found for image in decoded.images] == list(images)
            pixels = [piece for decoded in found for piece in decoded.on(CPU)]
            expected = [site.processor.resized_file(path) for path in images.values()]
            assert all(torch.equal(*pair) for pair in zip(pixels, expected, strict=True))
            assert all(decoded.seconds["decode"] > 0 for decoded in found)
    finally:
        decoder.close()


def test_a_bad_image_is_reported_and_does_not_affect_others(site, images, workers):
    keys = list(images)
    images[keys[0]].unlink()
    site.noise(images[keys[2]].name, 99)
    images[keys[3]].write_text("no image")
    text = image_key(images[keys[3]])
    decoder = DecodeAhead(images | {text: images[keys[3]]}, site.processor, CPU)
    asked = [*requests(images), Request((PlannedImage(text, 0, ()),))]
    found = list(decoder.run(asked))
    decoder.close()
    failed = {key: failure for decoded in found for key, failure in decoded.failed.items()}
    assert {key: failure.retry for key, failure in failed.items()} == {
        keys[0]: True, keys[2]: True, keys[3]: True, text: False
    }  # fmt: skip
    assert "not there" in failed[keys[0]].reason or "No such file" in failed[keys[0]].reason
    assert "has changed" in failed[keys[2]].reason and "unknown image format" in failed[text].reason
    assert [image.key for decoded in found for image in decoded.images] == [keys[1], keys[4]]


def test_archive_members_are_decoded_from_bytes_that_were_already_read(site, images):
    (key, path), *_ = images.items()
    data = path.read_bytes()
    path.unlink()
    decoder = DecodeAhead(images, site.processor, CPU)
    planned = (PlannedImage(key, 1, (str(path),)),)
    [decoded] = decoder.run([Request(planned, {path: data})])
    assert len(decoded.images) == 1
    [decoded] = decoder.run([Request(planned, {path: ImageError("cut short")})])
    assert decoded.failed[key].reason == "cut short" and decoded.failed[key].retry


def test_requests_are_drawn_one_at_a_time_without_decoding_processes(site, images):
    drawn = []

    def lazily():
        for request in requests(images):
            drawn.append(request)
            yield request

    decoder = DecodeAhead(images, site.processor, CPU)
    batches = decoder.run(lazily())
    assert drawn == []
    assert isinstance(next(batches), DecodedBatch) and len(drawn) == 1
