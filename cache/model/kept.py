"""How many tokens of an image token merging keeps, and which. Imports neither torch nor transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lookonce.cache.constants import Grid


def num_kept(num_tokens: int, keep: float) -> int:
    """The number of an image's tokens with `cache.keep`: at least one, unless it has none."""
    return max(1, round(keep * num_tokens)) if num_tokens else 0


@dataclass(frozen=True)
class KeptTokens:
    """The kept tokens of an image."""

    indices: NDArray[np.int32]
    """Their indices among all that the tower gives for the image, ascending."""
    grid_thw: Grid
    """The patch grid of the whole image."""
    merge_size: int
    """Patches of a token, in height and in width."""

    def fit(self, keep: float) -> bool:
        """Whether they are as many of the grid's tokens as `keep` leaves, each once and in order."""
        whole = math.prod(self.grid_thw) // self.merge_size**2
        steps = np.diff(self.indices.astype(np.int64), prepend=-1, append=whole)
        return len(self.indices) == num_kept(whole, keep) and bool((steps > 0).all())

    @property
    def stand_in(self) -> Grid:
        """A patch grid with as many tokens, by which a model divides the features of several images."""
        return 1, self.merge_size, self.merge_size * len(self.indices)
