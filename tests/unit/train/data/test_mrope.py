"""mRoPE positions equal the stock model's, wherever a conversation is split into prefix and branch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from lookonce.cache.model.kept import KeptTokens
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.datasets.records import Record, Turn
from lookonce.train.data.mrope import prefix_positions
from lookonce.train.data.tokenize import ChatTokenizer

TEXT, MERGE = 5, 2
GRID = st.tuples(st.just(1), st.integers(1, 9).map(lambda n: MERGE * n), st.integers(1, 9).map(lambda n: MERGE * n))
TURNS = (Turn("Is there text?", "yes"), Turn("How many polyps are in the image?", "2"))


@pytest.fixture(scope="module")
def model_folder(sample: Path) -> ModelFolder:
    return ModelFolder.open(str(sample / "model"))


@pytest.fixture(scope="module")
def stock(model_folder: ModelFolder):
    """The stock model's positions of one conversation, and the position of the token after it."""
    with torch.device("meta"):
        model = Qwen3VLModel(model_folder.config)
    assert model_folder.config.vision_config.spatial_merge_size == MERGE

    def positions(token_ids: np.ndarray, image_token_id: int, grids: list) -> tuple[np.ndarray, int]:
        sizes = [h * w // MERGE**2 for _, h, w in grids]
        repeats = np.ones(len(token_ids), np.int64)
        repeats[token_ids == image_token_id] = sizes
        ids = torch.from_numpy(np.repeat(token_ids, repeats).astype(np.int64))[None]
        is_image = (ids == image_token_id).int()
        image_grid_thw = torch.tensor(grids) if grids else None
        found, delta = model.get_rope_index(ids, mm_token_type_ids=is_image, image_grid_thw=image_grid_thw)
        return found[:, 0].numpy(), ids.shape[1] + int(delta)

    return positions


def tokens(num_before: int, images: list[tuple[tuple[int, int, int], int]], image_token_id: int) -> np.ndarray:
    """Text, then images, each followed by a number of text tokens."""
    pieces = [[TEXT] * num_before, *([image_token_id] + [TEXT] * num_after for _, num_after in images)]
    return np.array([token for piece in pieces for token in piece], np.int32)


@given(num_before=st.integers(0, 6), images=st.lists(st.tuples(GRID, st.integers(1, 6)), max_size=3))
def test_positions_of_a_whole_conversation_are_the_stock_models(stock, model_folder, num_before, images):
    image, grids = model_folder.config.image_token_id, [grid for grid, _ in images]
    token_ids = tokens(num_before + (not images), images, image)
    found, after = prefix_positions(token_ids, image, grids, MERGE)
    expected, expected_after = stock(token_ids, image, grids)
    assert found.tolist() == expected.tolist() and after == expected_after


@given(num_before=st.integers(0, 4), images=st.lists(st.tuples(GRID, st.integers(1, 6)), min_size=1, max_size=2))
def test_a_branch_continues_the_positions_of_its_prefix_wherever_it_begins(stock, model_folder, num_before, images):
    image, grids = model_folder.config.image_token_id, [grid for grid, _ in images]
    token_ids = tokens(num_before, images, image)
    expected, _ = stock(token_ids, image, grids)
    num_after_image = images[-1][1]
    for len_branch in range(num_after_image + 1):
        prefix, start = prefix_positions(token_ids[: len(token_ids) - len_branch], image, grids, MERGE)
        branch = np.broadcast_to(np.arange(start, start + len_branch), (3, len_branch))
        assert np.concatenate([prefix, branch], axis=1).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("images", "system"),
    [([(1, 8, 12)], None), ([(1, 12, 8)], "Answer briefly."), ([(1, 4, 6), (1, 14, 2)], None), ([], None)],
    ids=["one image", "a system text before it", "two images", "no image"],
)
def test_positions_of_records_in_the_models_own_chat_template_are_the_stock_models(stock, model_folder, images, system):
    chat_tokenizer = ChatTokenizer(model_folder.folder, model_folder.config)
    keys = [str(number) for number in range(len(images))]
    example = chat_tokenizer.example(Record(tuple(map(Path, keys)), TURNS, system=system), keys, images)
    found, _ = prefix_positions(example.token_ids, chat_tokenizer.image_token_id, images, chat_tokenizer.merge_size)
    expected, _ = stock(example.token_ids, chat_tokenizer.image_token_id, images)
    assert found.shape == (3, example.num_tokens) and found.tolist() == expected.tolist()


def test_text_counts_up_and_text_after_an_image_starts_behind_its_longer_side():
    """Two words, an image of 2 x 3 tokens, two words, an image of one token, a word."""
    token_ids = tokens(2, [((1, 4, 6), 2), ((1, 2, 2), 1)], image_token_id=9)
    found, after = prefix_positions(token_ids, 9, [(1, 4, 6), (1, 2, 2)], MERGE)
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert after == 9


@given(num_before=st.integers(0, 6), images=st.lists(st.tuples(GRID, st.integers(1, 6)), max_size=3), data=st.data())
def test_kept_tokens_and_text_have_their_positions_among_all(num_before, images, data):
    image, grids = 9, [grid for grid, _ in images]
    token_ids = tokens(num_before + (not images), images, image)
    kept, chosen = [], []
    for (t, h, w), num_after in images:
        size = t * h * w // MERGE**2
        some = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
        kept.append(KeptTokens(np.array(some, np.int32), (t, h, w), MERGE))
        chosen += [*(number in some for number in range(size)), *[True] * num_after]
    whole, after = prefix_positions(token_ids, image, grids, MERGE)
    found, found_after = prefix_positions(token_ids, image, grids, MERGE, kept)
    expected = whole[:, [True] * (num_before + (not images)) + chosen]
    assert found.tolist() == expected.tolist() and found_after == after
