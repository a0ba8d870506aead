"""mRoPE positions equal the stock model's, wherever a conversation is split into prefix and branch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.train.data.batches import prefix_positions

pytestmark = pytest.mark.guarantee("Positions equal those of the stock model.")

TEXT, MERGE = 5, 2
GRID = st.tuples(st.just(1), st.integers(1, 9).map(lambda n: MERGE * n), st.integers(1, 9).map(lambda n: MERGE * n))


@pytest.fixture(scope="module")
def stock(sample_model: ModelFolder):
    """The stock model's positions of one conversation, and the position of the token after it."""
    with torch.device("meta"):
        model = Qwen3VLModel(sample_model.config)
    assert sample_model.config.vision_config.spatial_merge_size == MERGE

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


@given(num_before=st.integers(1, 6), images=st.lists(st.tuples(GRID, st.integers(1, 6)), max_size=3))
def test_positions_are_the_stock_models_wherever_a_branch_begins(stock, sample_model, num_before, images):
    image, grids = sample_model.config.image_token_id, [grid for grid, _ in images]
    token_ids = tokens(num_before, images, image)
    expected, after = stock(token_ids, image, grids)
    for len_branch in range(images[-1][1] + 1 if images else num_before):
        prefix, start = prefix_positions(token_ids[: len(token_ids) - len_branch], image, grids, MERGE)
        branch = np.broadcast_to(np.arange(start, start + len_branch), (3, len_branch))
        assert np.concatenate([prefix, branch], axis=1).tolist() == expected.tolist() and start + len_branch == after
