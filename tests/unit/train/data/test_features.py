"""Cached features: each image is read once per batch, and the most recently used images stay in memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.train.data.batches import CachedFeatures, image_inputs

NUM_TOKENS = {"a": 1, "b": 2, "c": 3, "d": 4}
BYTES_A_TOKEN = 4 * 5 * 3


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


def source(max_tokens: int = 0) -> tuple[CachedFeatures, FakeCache]:
    cache = FakeCache()
    return CachedFeatures(cache, max_tokens * BYTES_A_TOKEN), cache


def names(features: torch.Tensor) -> str:
    return "".join(chr(int(value)) for value in features[:, 0, 0])


BATCHES = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), max_size=12)


@given(BATCHES, st.integers(0, 12))
def test_images_follow_one_another_as_often_as_they_occur(batches, max_tokens):
    features, _ = source(max_tokens)
    for keys in batches:
        assert names(features.load(keys)) == "".join(key * NUM_TOKENS[key] for key in keys)


@given(BATCHES)
def test_each_image_of_a_batch_is_read_once(batches):
    features, cache = source()
    for keys in batches:
        cache.read.clear()
        features.load(keys)
        assert Counter(cache.read) == Counter(set(keys))


class Kept:
    """The expected host cache: the most recently used images that fit, oldest first."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.keys: list[str] = []

    def missing(self, keys: list[str]) -> list[str]:
        """Use some images; returns those that were not cached."""
        used = list(dict.fromkeys(keys))
        missing = [key for key in used if key not in self.keys]
        self.keys = [key for key in self.keys if key not in used] + used
        while sum(NUM_TOKENS[key] for key in self.keys) > self.max_tokens:
            self.keys.pop(0)
        return missing


@given(BATCHES, st.integers(0, 12))
def test_the_most_recently_used_images_are_kept_and_only_others_are_read(batches, max_tokens):
    features, cache = source(max_tokens)
    kept, num_tokens = Kept(max_tokens), 0
    for keys in batches:
        cache.read.clear()
        features.load(keys)
        assert cache.read == kept.missing(keys)
        num_tokens += sum(NUM_TOKENS[key] for key in cache.read)
        assert features.bytes_read == num_tokens * BYTES_A_TOKEN


@pytest.mark.parametrize(
    ("max_tokens", "batches", "read"),
    [
        (0, ["a", "a"], ["a", "a"]),
        (3, ["a", "b", "a"], ["a", "b", ""]),
        (3, ["a", "b", "a", "c", "b"], ["a", "b", "", "c", "b"]),
        (5, ["a", "b", "a", "c", "a", "b"], ["a", "b", "", "c", "", "b"]),
        (5, ["ab", "d", "a"], ["ab", "d", "a"]),
        (3, ["abcd", "c", "d"], ["abcd", "c", "d"]),
        (4, ["abcd", "d", "a"], ["abcd", "", "a"]),
    ],
    ids=[
        "no cache",
        "one image fits",
        "a larger image evicts the cached one",
        "the least recently used is evicted first",
        "a large image evicts two",
        "the last of a batch is too large",
        "the last images of a batch stay",
    ],
)
def test_images_are_read_as_the_table_says(max_tokens, batches, read):
    features, cache = source(max_tokens)
    for keys, expected in zip(batches, read, strict=True):
        cache.read.clear()
        features.load(list(keys))
        assert "".join(cache.read) == expected


def test_a_batch_without_images_reads_nothing():
    features, cache = source()
    assert image_inputs(features, []) == {} and cache.read == []


def test_a_batch_has_the_grids_of_its_images():
    found = image_inputs(source()[0], ["b", "a", "b"])
    assert found["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2], [1, 2, 4]]
    assert found["pixel_values"].shape == (5, 5, 3)
