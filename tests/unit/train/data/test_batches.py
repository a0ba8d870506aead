"""Forward passes to batches: the texts and the images of what goes through the model together."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lookonce.run.config import BatchSection
from lookonce.train.data.batches import Feed
from lookonce.train.data.packing import BLOCK
from lookonce.train.data.tokenize import Example

START, IMAGE, END, PAD = 97, 98, 99, 0
TOKENS_OF = {"a": 2, "b": 3}
PROMPTER = SimpleNamespace(image_token_id=IMAGE, merge_size=2, tokenizer=SimpleNamespace(pad_token_id=PAD))
MODES = ("shared", "packed", "separate")
IN_ROWS = {"input_ids", "attention_mask", "mm_token_type_ids"}
IN_PACKS = {"input_ids", "position_ids", "run", "prefix"}
OF_TARGETS = {"logits_to_keep", "targets", "weights"}
OF_IMAGES = {"pixel_values", "image_grid_thw"}


class FakeVision:
    """One level of one number per token, which names the image."""

    has_tower = False

    def grid_thw(self, key):
        return (1, 2, 2 * TOKENS_OF[key])

    def load(self, keys, device="cpu"):
        return torch.cat([torch.full((TOKENS_OF[key], 1, 1), float(ord(key))) for key in keys])


def example(key: str, question: int) -> Example:
    tokens = [*([START, IMAGE, END] if key else []), 5, question, 6]
    supervised = np.arange(len(tokens)) == len(tokens) - 1
    return Example(np.array(tokens, np.int32), supervised, tuple(key), tuple(TOKENS_OF[k] for k in key), "")


EXAMPLES = [example("a", 1), example("b", 1), example("a", 2), example("", 1)]


def feed(mode: str, device: str = "cpu", **batch: object) -> Feed:
    options = BatchSection(**{"mode": mode, "samples_per_step": 4, "order": "as_given"} | batch)
    return Feed.of(EXAMPLES, PROMPTER, FakeVision(), options, torch.device(device), seed=0)


def batches(feed: Feed) -> list[dict[str, torch.Tensor]]:
    return [feed.batch(forward) for step in feed.order.epoch(0) for forward in step]


def shown(batch: dict[str, torch.Tensor]) -> str:
    return "".join(chr(int(value)) for value in batch["pixel_values"].flatten())


def test_questions_that_share_an_image_bring_it_once():
    [batch] = batches(feed("shared"))
    assert batch.keys() == IN_PACKS | OF_TARGETS | OF_IMAGES
    assert shown(batch) == "aabbb" and len(batch["image_grid_thw"]) == 2


def test_in_packs_without_sharing_every_question_brings_its_image():
    [batch] = batches(feed("packed"))
    assert batch.keys() == IN_PACKS | OF_TARGETS | OF_IMAGES
    assert sorted(shown(batch)) == list("aaaabbb")


def test_rows_bring_their_images_in_their_order():
    first, second = batches(feed("separate", samples_per_forward=2))
    assert first.keys() == IN_ROWS | OF_TARGETS | OF_IMAGES
    assert shown(first) == "aaaa" and shown(second) == "bbb"


def test_a_forward_pass_without_images_has_none():
    [*_, last] = batches(feed("separate", samples_per_forward=1))
    assert last.keys() == IN_ROWS | OF_TARGETS


@pytest.mark.parametrize("mode", MODES)
def test_images_are_as_many_tokens_as_there_are_places_for(mode):
    for batch in batches(feed(mode)):
        assert len(batch["pixel_values"]) == (batch["input_ids"] == IMAGE).sum()


@pytest.mark.parametrize(("in_blocks", "expected"), [(False, 20), (True, 2 * BLOCK)])
def test_packs_are_as_long_as_they_are_or_whole_blocks(in_blocks, expected):
    [batch] = batches(replace(feed("shared"), in_blocks=in_blocks))
    assert batch["input_ids"].shape == (1, expected)
    assert (batch["input_ids"][0, 20:] == PAD).all()


def test_only_packs_on_a_gpu_are_padded():
    padded = {(mode, device): feed(mode, device).in_blocks for mode in MODES for device in ("cuda", "cpu")}
    assert {of for of, in_blocks in padded.items() if in_blocks} == {("shared", "cuda"), ("packed", "cuda")}
