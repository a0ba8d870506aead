"""Positions of a conversation's beginning as Qwen3-VL counts them (mRoPE: time, height, width).

Text counts up on all three axes. An image's tokens lie on a grid that begins where the text has come to, and what
follows begins behind the longer side of that grid. Source: `get_rope_index` of transformers'
models/qwen3_vl/modeling_qwen3_vl.py, which takes a whole batch and the model; this takes a prefix, which is all that a
pack needs, since what follows an image counts up from where the prefix ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookonce.cache.store.receipts import Grid


def prefix_positions(
    token_ids: NDArray[np.int32], image_token_id: int, grids: Sequence[Grid], merge_size: int
) -> tuple[NDArray[np.int64], int]:
    """`[3, n]` for `n` tokens with each image's one placeholder expanded, and the position of what comes after them."""
    places = np.flatnonzero(token_ids == image_token_id)
    pieces, start, done = [], 0, 0
    for place, (t, h, w) in zip([*places, len(token_ids)], [*grids, (0, 0, 0)], strict=True):
        num_text = int(place) - done
        pieces.append(np.broadcast_to(np.arange(start, start + num_text), (3, num_text)))
        start, done = start + num_text, int(place) + 1
        pieces.append(np.indices((t, h // merge_size, w // merge_size)).reshape(3, -1) + start)
        start += max(h, w) // merge_size
    return np.concatenate(pieces, axis=1), start
