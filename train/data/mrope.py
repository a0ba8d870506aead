"""mRoPE positions of a prefix, as Qwen3-VL defines them: time, height and width of each token.

Text tokens count up on all three axes. An image's tokens lie on a grid that starts at the next text position; the text
after the image starts behind the longer side of that grid. Source: `get_rope_index` of transformers'
models/qwen3_vl/modeling_qwen3_vl.py, which takes a whole batch and the model. This function takes a prefix only. That
is all that a pack needs, since the positions of a branch count up from the end of its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lookonce.cache.format import Grid


def prefix_positions(
    token_ids: NDArray[np.int32], image_token_id: int, grids: Sequence[Grid], merge_size: int
) -> tuple[NDArray[np.int64], int]:
    """Positions `[3, N]` of `N` tokens, placeholders expanded, and the position of the token after them.

    `token_ids` has one placeholder per image; `grids` are in patches, of which `merge_size` squared make one token.
    """
    placeholders = np.flatnonzero(token_ids == image_token_id)
    pieces, start, done = [], 0, 0
    for end, (t, h, w) in zip([*placeholders, len(token_ids)], [*grids, (0, 0, 0)], strict=True):
        num_text = int(end) - done
        pieces.append(np.broadcast_to(np.arange(start, start + num_text), (3, num_text)))
        start, done = start + num_text, int(end) + 1
        pieces.append(np.indices((t, h // merge_size, w // merge_size)).reshape(3, -1) + start)
        start += max(h, w) // merge_size
    return np.concatenate(pieces, axis=1), start
