"""Cached features: each image is read once per batch."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.train.data.batches import CachedFeatures

NUM_TOKENS = {"a": 1, "b": 2, "c": 3, "d": 4}
BYTES_A_TOKEN = 4 * 5 * 3
"""Bytes of the float32 features of five levels of three numbers."""


class FakeCache:
    """Features `[num_tokens, 5, 3]` whose values name their image. Remembers which keys were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def get_many(self, keys: list[str], *, pin: bool = False) -> list[torch.Tensor]:
        assert not pin, "there is no GPU"
        self.read += keys
        return [torch.full((NUM_TOKENS[key], 5, 3), float(ord(key))) for key in keys]


def names(features: torch.Tensor) -> str:
    return "".join(chr(int(value)) for value in features[:, 0, 0])


BATCHES = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), max_size=12)


@given(BATCHES)
def test_images_follow_one_another_as_often_as_they_occur_and_each_is_read_once(batches):
    cache = FakeCache()
    features = CachedFeatures(cache)
    for keys in batches:
        cache.read.clear()
        before = features.bytes_read
        assert names(features.load(keys)) == "".join(key * NUM_TOKENS[key] for key in keys)
        assert Counter(cache.read) == Counter(set(keys))
        assert features.bytes_read - before == sum(NUM_TOKENS[key] for key in cache.read) * BYTES_A_TOKEN
