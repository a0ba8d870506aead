"""Cached features: each image is read once per batch."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.train.data.batches import CachedFeatures, image_inputs

NUM_TOKENS = {"a": 1, "b": 2, "c": 3, "d": 4}
BYTES_A_TOKEN = 4 * 5 * 3
"""Bytes of the float32 features of five levels of three numbers."""


class FakeCache:
    """Features `[num_tokens, 5, 3]` whose values name their image. Remembers which keys were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def grid_thw(self, key: str) -> tuple[int, int, int]:
        return (1, 2, 2 * NUM_TOKENS[key])

    def get_many(self, keys: list[str], *, pin: bool = False) -> list[torch.Tensor]:
        assert not pin, "there is no GPU"
        self.read += keys
        return [torch.full((NUM_TOKENS[key], 5, 3), float(ord(key))) for key in keys]


def source() -> tuple[CachedFeatures, FakeCache]:
    cache = FakeCache()
    return CachedFeatures(cache), cache


def names(features: torch.Tensor) -> str:
    return "".join(chr(int(value)) for value in features[:, 0, 0])


BATCHES = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), max_size=12)


@given(BATCHES)
def test_images_follow_one_another_as_often_as_they_occur_and_each_is_read_once(batches):
    features, cache = source()
    for keys in batches:
        cache.read.clear()
        before = features.bytes_read
        assert names(features.load(keys)) == "".join(key * NUM_TOKENS[key] for key in keys)
        assert Counter(cache.read) == Counter(set(keys))
        assert features.bytes_read - before == sum(NUM_TOKENS[key] for key in cache.read) * BYTES_A_TOKEN


def test_a_batch_without_images_reads_nothing():
    features, cache = source()
    assert image_inputs(features, []) == {} and cache.read == []


def test_a_batch_has_the_grids_of_its_images():
    found = image_inputs(source()[0], ["b", "a", "b"])
    assert found["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2], [1, 2, 4]]
    assert found["pixel_values"].shape == (5, 5, 3)
