"""Collating rows: padding, columns to predict from, target weights, and images, each read once per batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lookonce.train.data.batches import IGNORED, CachedFeatures, RowCollator
from lookonce.train.data.tokenize import Example

IMAGE, PAD = 99, 0
TOKENS_OF = {"a": 2, "b": 3, "c": 1, "d": 4}


def example(tokens: list[int], answer: int, keys: str = "") -> Example:
    """An example whose last `answer` tokens are supervised."""
    supervised = np.arange(len(tokens)) >= len(tokens) - answer
    sizes = tuple(TOKENS_OF[key] for key in keys)
    return Example(np.array(tokens, np.int32), supervised, tuple(keys), sizes, "")


EXAMPLES = [example([5, IMAGE, 6, 7], 1, "a"), example([IMAGE, 8, IMAGE, 9, 10], 2, "ba"), example([11, 12], 1)]


class FakeCache:
    """Features `[num_tokens, 5, 3]` whose values name their image. Remembers which keys were read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def grid_thw(self, key: str) -> tuple[int, int, int]:
        return (1, 2, 2 * TOKENS_OF[key])

    def get_many(self, keys: list[str], *, pin: bool = False) -> list[torch.Tensor]:
        assert not pin, "there is no GPU"
        self.read += keys
        return [torch.full((TOKENS_OF[key], 5, 3), float(ord(key))) for key in keys]


def names(features: torch.Tensor) -> str:
    return "".join(chr(int(value)) for value in features[:, 0, 0])


@pytest.fixture
def collator() -> RowCollator:
    return RowCollator(CachedFeatures(FakeCache()), IMAGE, PAD)


def test_rows_are_padded_on_the_right_and_have_the_columns_before_targets_and_the_images_in_order(collator):
    batch = collator(EXAMPLES)
    assert batch["input_ids"].tolist() == [
        [5, IMAGE, IMAGE, 6, 7, PAD, PAD, PAD],
        [IMAGE, IMAGE, IMAGE, 8, IMAGE, IMAGE, 9, 10],
        [11, 12, PAD, PAD, PAD, PAD, PAD, PAD],
    ]
    assert batch["attention_mask"].sum(dim=1).tolist() == [5, 8, 2]
    assert torch.equal(batch["mm_token_type_ids"] == 1, batch["input_ids"] == IMAGE)
    assert batch["logits_to_keep"].tolist() == [0, 3, 5, 6]
    assert batch["targets"].tolist() == [
        [IGNORED, 7, IGNORED, IGNORED],
        [IGNORED, IGNORED, 9, 10],
        [12, IGNORED, IGNORED, IGNORED],
    ]
    assert batch["weights"][batch["targets"] != IGNORED].tolist() == pytest.approx([0.25] * 4)
    assert names(batch["pixel_values"]) == "aabbbaa"
    assert batch["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 6], [1, 2, 4]]


def test_targets_have_their_examples_weight_and_the_rest_has_weight_0(collator):
    batch = collator.text_batch(EXAMPLES, [0.5, 0.25, 2.0])
    assert batch["weights"].tolist() == [[0, 0.5, 0, 0], [0, 0, 0.25, 0.25], [2, 0, 0, 0]]
    assert "pixel_values" not in batch


def test_prompts_are_padded_on_the_left(collator):
    batch = collator.prompts(EXAMPLES[1:])
    assert batch["input_ids"][1].tolist() == [PAD] * 6 + [11, 12]
    assert batch["attention_mask"][1].tolist() == [0] * 6 + [1, 1]
    assert torch.equal(collator.prompts(EXAMPLES)["pixel_values"], collator(EXAMPLES)["pixel_values"])
    assert "targets" not in batch


BYTES_A_TOKEN = 4 * 5 * 3
"""Bytes of the float32 features of five levels of three numbers."""


BATCHES = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=6), max_size=12)


@given(BATCHES)
def test_images_follow_one_another_as_often_as_they_occur_and_each_is_read_once(batches):
    cache = FakeCache()
    features = CachedFeatures(cache)
    for keys in batches:
        cache.read.clear()
        before = features.bytes_read
        assert names(features.load(keys)) == "".join(key * TOKENS_OF[key] for key in keys)
        assert Counter(cache.read) == Counter(set(keys))
        assert features.bytes_read - before == sum(TOKENS_OF[key] for key in cache.read) * BYTES_A_TOKEN
