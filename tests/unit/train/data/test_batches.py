"""Batches hold the texts and the images of their micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.batches import BatchMaker

from lookonce.run.sections import BatchSection
from lookonce.train.data.batches import CPU
from lookonce.train.data.packing import BLOCK
from lookonce.train.data.tokenize import Example

START, IMAGE, END, PAD = 97, 98, 99, 0
TOKENS_OF = {"a": 2, "b": 3}
CHAT_TOKENIZER = SimpleNamespace(image_token_id=IMAGE, merge_size=2, tokenizer=SimpleNamespace(pad_token_id=PAD))
MODES = ("shared", "packed", "separate")
ROW_KEYS = {"input_ids", "attention_mask", "mm_token_type_ids"}
PACK_KEYS = {"input_ids", "position_ids", "seen_until"}
TARGET_KEYS = {"logits_to_keep", "targets", "weights"}
IMAGE_KEYS = {"pixel_values", "image_grid_thw"}


def example(key: str, question: int) -> Example:
    tokens = [*([START, IMAGE, END] if key else []), 5, question, 6]
    supervised = np.arange(len(tokens)) == len(tokens) - 1
    return Example(np.array(tokens, np.int32), supervised, tuple(key), tuple(TOKENS_OF[k] for k in key), "")


EXAMPLES = [example("a", 1), example("b", 1), example("a", 2), example("", 1)]


@pytest.fixture
def batch_maker(make_source) -> Callable[..., BatchMaker]:
    def make(mode: str, pads: bool = False, **batch: object) -> BatchMaker:
        options = BatchSection(**{"mode": mode, "samples_per_step": 4, "order": "as_given"} | batch)
        source = make_source(TOKENS_OF)
        return BatchMaker.of(EXAMPLES, CHAT_TOKENIZER, source, options, CPU, seed=0, pads=pads)

    return make


def batches(batch_maker: BatchMaker) -> list[dict[str, torch.Tensor]]:
    return [batch_maker.batch(micro_batch) for step in batch_maker.sampler.epoch(0) for micro_batch in step]


def shown(batch: dict[str, torch.Tensor]) -> str:
    return "".join(chr(int(value)) for value in batch["pixel_values"].flatten())


def test_questions_that_share_an_image_show_it_once(batch_maker):
    [batch] = batches(batch_maker("shared"))
    assert batch.keys() == PACK_KEYS | TARGET_KEYS | IMAGE_KEYS
    assert shown(batch) == "aabbb" and len(batch["image_grid_thw"]) == 2


def test_in_packed_mode_every_question_has_its_own_image(batch_maker):
    [batch] = batches(batch_maker("packed"))
    assert batch.keys() == PACK_KEYS | TARGET_KEYS | IMAGE_KEYS
    assert sorted(shown(batch)) == list("aaaabbb")


def test_rows_have_their_images_in_order(batch_maker):
    first, second = batches(batch_maker("separate", samples_per_forward=2))
    assert first.keys() == ROW_KEYS | TARGET_KEYS | IMAGE_KEYS
    assert shown(first) == "aaaa" and shown(second) == "bbb"


def test_a_micro_batch_without_images_has_no_image_tensors(batch_maker):
    [*_, last] = batches(batch_maker("separate", samples_per_forward=1))
    assert last.keys() == ROW_KEYS | TARGET_KEYS


@pytest.mark.parametrize("mode", MODES)
def test_images_have_as_many_tokens_as_placeholders(mode, batch_maker):
    for batch in batches(batch_maker(mode)):
        assert len(batch["pixel_values"]) == (batch["input_ids"] == IMAGE).sum()


@pytest.mark.parametrize(("pads_to_blocks", "expected"), [(False, 20), (True, 2 * BLOCK)])
def test_packs_are_unpadded_or_padded_to_whole_blocks(pads_to_blocks, expected, batch_maker):
    [batch] = batches(batch_maker("shared", pads=pads_to_blocks))
    assert batch["input_ids"].shape == (1, expected)
    assert (batch["input_ids"][0, 20:] == PAD).all()
