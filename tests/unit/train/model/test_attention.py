"""Attention over packs: the dense mask and FlexAttention's blocks follow the rule in attention.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lookonce.datasets.records import Record, Turn
from lookonce.train.data.batches import CachedFeatures, RowCollator
from lookonce.train.data.packing import BLOCK, padded_length
from lookonce.train.data.tokenize import ChatTokenizer
from lookonce.train.model import attention
from lookonce.train.model.attention import PackMask, dense_mask, shared_prefix_attention
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.load import load_without_tower, text_model

CPU = torch.device("cpu")
Images = list[tuple[int, list[int]]]


def seen_until(images: Images, padding: int) -> torch.Tensor:
    """The column of a pack of images with a prefix and branches of these lengths: prefixes end with their image."""
    ends: list[int] = []
    for len_prefix, branches in images:
        start = len(ends)
        ends += [start + len_prefix + sum(branches)] * len_prefix
        for length in branches:
            ends += [len(ends) + length] * length
    return torch.tensor([*ends, *[len(ends) + padding] * padding], dtype=torch.int32)


def num_tokens(images: Images) -> int:
    return sum(len_prefix + sum(branches) for len_prefix, branches in images)


def padded(images: Images, length: int) -> torch.Tensor:
    return seen_until(images, length - num_tokens(images))


def test_a_pack_of_incomplete_blocks_is_refused():
    with pytest.raises(AssertionError):
        PackMask(2 * BLOCK, CPU).blocks(padded([(100, [20, 8])], BLOCK + BLOCK // 2))


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 2), (2 * BLOCK, 2), (2 * BLOCK + 1, 3), (4096, 32), (4097, 34), (8193, 68)]
)
def test_packs_are_padded_to_some_dozens_of_lengths_in_whole_blocks(num_tokens, expected):
    assert padded_length(num_tokens) == expected * BLOCK


TENSORS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
TENSORS += tuple(name.replace("kv_", "q_") for name in TENSORS)


@pytest.mark.parametrize("seed", range(2))
def test_blocks_equal_those_of_pytorchs_create_block_mask(seed):
    torch.manual_seed(seed)
    images = [(int(torch.randint(1, 400, ())), torch.randint(1, 60, (9,)).tolist()) for _ in range(4)]
    column = padded(images, padded_length(num_tokens(images)) + seed * BLOCK)
    ours = PackMask(len(column), CPU).blocks(column)
    pytorchs = create_block_mask(ours.mask_mod, None, None, len(column), len(column), "cpu", BLOCK)
    assert ours.seq_lengths == pytorchs.seq_lengths and ours.BLOCK_SIZE == pytorchs.BLOCK_SIZE
    for name in TENSORS:
        found, expected = getattr(ours, name), getattr(pytorchs, name)
        assert torch.equal(found, expected) and found.dtype == expected.dtype, name
        assert found.stride() == expected.stride(), f"the kernels would read wrong values of {name}"
    assert ours.full_kv_num_blocks.sum() > 0 < ours.kv_num_blocks.sum()


PACKS: list[tuple[Images, int]] = [
    ([(150, [9, 30, 17]), (90, [40, 25])], 3 * BLOCK),
    ([(20, [9, 30]), (70, [20, 5])], 2 * BLOCK),
    ([(0, [3]), (BLOCK, [BLOCK])], 3 * BLOCK),
    ([(100, [20, 8])], BLOCK),
]


def test_flex_attention_equals_sdpa_for_one_pack_after_another(monkeypatch):
    """FlexAttention in its eager mode for debugging, as there is no GPU to compile for."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention, "_compiled", lambda: flex_attention)
    generator = torch.Generator().manual_seed(0)
    mask, layer = PackMask(3 * BLOCK, CPU), SimpleNamespace(num_key_value_groups=2, is_causal=True)
    for images, length in PACKS:
        column = padded(images, length)
        query, key, value = (torch.randn(1, heads, length, 16, generator=generator) for heads in (4, 2, 2))
        found, _ = shared_prefix_attention(layer, query, key, value, mask.blocks(column), scaling=0.3)
        expected, _ = shared_prefix_attention(layer, query, key, value, dense_mask(column), scaling=0.3)
        assert found.shape == (1, length, 4, 16)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@given(st.data(), st.integers(1, 4))
def test_blocks_are_counted_right_for_any_number_of_levels(data, num_blocks):
    """Each token may be seen until any later one: more than any tree of prefixes has."""
    length = num_blocks * BLOCK
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    some_ends = torch.randint(1, length + 1, (data.draw(st.integers(1, 6)),), generator=generator)
    column = some_ends[torch.randint(len(some_ends), (length,), generator=generator)].max(torch.arange(length) + 1)
    allowed = dense_mask(column)[0, 0].unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    partial, full = attention.partial_and_full_blocks(column)
    assert torch.equal(full, allowed.all(3).all(1)) and torch.equal(partial | full, allowed.any(3).any(1))
    assert not (partial & full).any()


def test_without_the_mask_of_a_pack_the_model_answers_as_before(built, sample_model):
    """Answers may be generated while the layers are set up for packs."""
    chat_tokenizer = ChatTokenizer(sample_model.folder, sample_model.config)
    keys = list(built.keys())[:3]
    texts = ["Is there text?", "How many polyps are in the image?", "What is it?"]
    records = [Record((Path(key),), (Turn(text, "yes"),)) for key, text in zip(keys, texts, strict=True)]
    questions = [
        chat_tokenizer.question(record, 0, [key], [built.grid_thw(key)])
        for record, key in zip(records, keys, strict=True)
    ]
    collator = RowCollator(CachedFeatures(built), chat_tokenizer.image_token_id, chat_tokenizer.tokenizer.pad_token_id)
    batch, model = collator.prompts(questions), load_without_tower(sample_model, torch.float32)
    assert batch["attention_mask"].min() == 0, "all prompts have the same length"
    asked = {"do_sample": False, "max_new_tokens": 6}
    expected = model.generate(**batch, **asked)
    with training_on_packs(model, compiled=False):
        assert text_model(model).config._attn_implementation == attention.NAME
        found = model.generate(**batch, **asked)
    assert torch.equal(found, expected)
    assert text_model(model).config._attn_implementation == "sdpa"
