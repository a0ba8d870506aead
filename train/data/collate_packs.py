"""Collator of packs: each group's prefix once, then its branches, in one row.

Design: the positions of a branch continue from the end of its prefix, so each token has the position that it has in a
conversation of its own. Which token attends to which follows from the segments (attention.py). If the first token of a
branch is a target, it is predicted from the last token of the prefix. Several branches may do so, and `logits_to_keep`
then lists that index several times.

Shapes: `L` tokens of the pack with padding, `K` targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lookonce.cache.constants import Grid
from lookonce.train.data.features import Batch
from lookonce.train.data.groups import Group
from lookonce.train.data.mrope import prefix_positions
from lookonce.train.data.tokenize import Example

Column = NDArray[np.int64]


@dataclass(frozen=True)
class PackCollator:
    """Makes batches of packs."""

    image_token_id: int
    pad_token_id: int
    merge_size: int
    grid_of: Callable[[str], Grid]

    def __call__(
        self, groups: Sequence[Group], examples: Sequence[Example], target_weights: Sequence[float], length: int
    ) -> Batch:
        """The batch of one pack, padded to `length` tokens.

        `target_weights` has one weight per example, in the order of `groups`, for each of the example's targets.

        `input_ids` `[1, L]`; `position_ids` `[3, 1, L]`; `segment`, `prefix` `[L]`: each token's segment, and the
        segment that is its prefix; `logits_to_keep` `[K]`: indices of the tokens to predict from; `targets`, `weights`
        `[1, K]`: the tokens to predict there and their weights.
        """
        pack = _PackBuilder()
        weights = iter(target_weights)
        for group in groups:
            self._add(pack, group, examples, [next(weights) for _ in group.examples])
        return pack.batch(length, self.pad_token_id)

    def _add(self, pack: _PackBuilder, group: Group, examples: Sequence[Example], weights: Sequence[float]) -> None:
        first = examples[group.examples[0]]
        prefix_ids = first.token_ids[: group.len_prefix]
        grids = [self.grid_of(key) for key in first.image_keys]
        positions, start = prefix_positions(prefix_ids, self.image_token_id, grids, self.merge_size)
        repeats = np.ones(len(prefix_ids), dtype=np.int64)
        repeats[prefix_ids == self.image_token_id] = first.num_image_tokens
        prefix = pack.add_segment(np.repeat(prefix_ids, repeats).astype(np.int64), positions)
        last = pack.length - 1
        for index, weight in zip(group.examples, weights, strict=True):
            branch = examples[index].token_ids[group.len_prefix :].astype(np.int64)
            positions = np.broadcast_to(np.arange(start, start + len(branch)), (3, len(branch)))
            targets = np.flatnonzero(examples[index].supervised[group.len_prefix :])
            predict_from = np.where(targets > 0, pack.length + targets - 1, last)
            pack.add_targets(predict_from, branch[targets], weight)
            pack.add_segment(branch, positions, prefix)


class _PackBuilder:
    """The columns of a pack while segments are added."""

    def __init__(self) -> None:
        self.length = self._num_segments = 0
        self._tokens: list[Column] = []
        self._positions: list[Column] = []
        self._segments: list[tuple[int, int, int]] = []
        """Each segment's length, number, and the number of its prefix."""
        self._predict_from: list[Column] = []
        self._targets: list[Column] = []
        self._weights: list[NDArray[np.float32]] = []

    def add_segment(self, tokens: Column, positions: Column, prefix: int | None = None) -> int:
        """Add a segment and return its number. Without `prefix` it is its own prefix."""
        number = self._num_segments
        self._num_segments += 1
        self._tokens.append(tokens)
        self._positions.append(positions)
        self._segments.append((len(tokens), number, number if prefix is None else prefix))
        self.length += len(tokens)
        return number

    def add_targets(self, predict_from: Column, targets: Column, weight: float) -> None:
        self._predict_from.append(predict_from)
        self._targets.append(targets)
        self._weights.append(np.full(len(targets), weight, dtype=np.float32))

    def batch(self, length: int, pad_token_id: int) -> Batch:
        assert self.length <= length, (self.length, length)
        padding = length - self.length
        self.add_segment(np.full(padding, pad_token_id), np.zeros((3, padding), dtype=np.int64))
        lengths, segments, prefixes = np.array(self._segments).T
        return {
            "input_ids": torch.from_numpy(np.concatenate(self._tokens))[None],
            "position_ids": torch.from_numpy(np.concatenate(self._positions, axis=1))[:, None],
            "segment": torch.from_numpy(np.repeat(segments, lengths).astype(np.int32)),
            "prefix": torch.from_numpy(np.repeat(prefixes, lengths).astype(np.int32)),
            "logits_to_keep": torch.from_numpy(np.concatenate(self._predict_from)),
            "targets": torch.from_numpy(np.concatenate(self._targets))[None],
            "weights": torch.from_numpy(np.concatenate(self._weights))[None],
        }
