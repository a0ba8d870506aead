"""Collator of packs: each group's prefix once, then its branches, in one row.

Design: the positions of a branch continue from the end of its prefix, so each token has the position that it has in a
conversation of its own. A branch that shares its first tokens with the one before it adds the others only, so the pack
is a tree in depth-first order: the tokens that continue a token are those behind it, up to where it is closed. If the
first own token of a branch is a target, it is predicted from the last token before it, which may be in the prefix.
Several branches may do so, and `logits_to_keep` then lists that index several times.

Shapes: `L` tokens of the pack with padding, `K` targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import torch
from numpy.typing import NDArray

from lookonce.train.data.features import Batch, FeatureSource
from lookonce.train.data.groups import Group
from lookonce.train.data.mrope import prefix_positions
from lookonce.train.data.tokenize import ChatTokenizer, Example

Column = NDArray[np.int64]
NO_TOKEN = -1
"""Stands before the first token of a conversation without images, which no token predicts."""


@dataclass(frozen=True)
class PackCollator:
    """Makes batches of packs."""

    image_token_id: int
    pad_token_id: int
    merge_size: int
    source: FeatureSource

    @classmethod
    def of(cls, chat: ChatTokenizer, source: FeatureSource) -> PackCollator:
        """The collator of a model's tokens, whose images a source has."""
        return cls(chat.image_token_id, chat.tokenizer.pad_token_id, chat.merge_size, source)

    def __call__(
        self, groups: Sequence[Group], examples: Sequence[Example], target_weights: Sequence[float], length: int
    ) -> Batch:
        """The batch of one pack, padded to `length` tokens.

        `target_weights` has one weight per example, in the order of `groups`, for each of the example's targets.

        `input_ids` `[1, L]`; `position_ids` `[3, 1, L]`; `seen_until` `[L]`: the index before which later tokens attend
        to each token; `logits_to_keep` `[K]`: indices of the tokens to predict from; `targets`, `weights` `[1, K]`: the
        tokens to predict there and their weights.
        """
        pack = _PackBuilder(length, self.pad_token_id)
        weights = iter(target_weights)
        for group in groups:
            self._add(pack, group, examples, [next(weights) for _ in group.examples])
        return pack.batch()

    def _add(self, pack: _PackBuilder, group: Group, examples: Sequence[Example], weights: Sequence[float]) -> None:
        first = examples[group.examples[0]]
        prefix_ids = first.token_ids[: group.len_prefix]
        grids = [self.source.grid_thw(key) for key in first.image_keys]
        positions, start = prefix_positions(prefix_ids, self.image_token_id, grids, self.merge_size)
        repeats = np.ones(len(prefix_ids), dtype=np.int64)
        repeats[prefix_ids == self.image_token_id] = first.num_image_tokens
        prefix = pack.add(np.repeat(prefix_ids, repeats), positions)
        path = np.append(NO_TOKEN, prefix)[-1:]  # what a branch continues: the last token of the prefix, and its own
        branches = zip(
            group.examples, group.branch_tokens, chain(group.shared_tokens, repeat(0)), weights, strict=False
        )
        for index, num_tokens, shared, weight in branches:
            rest = examples[index].token_ids[group.len_prefix :]
            pack.close(path[1 + shared :])
            own = pack.add(rest[shared:num_tokens], np.arange(start + shared, start + num_tokens))
            path = np.concatenate([path[: 1 + shared], own])
            targets = np.flatnonzero(examples[index].supervised[group.len_prefix :])
            pack.add_targets(path[targets], rest[targets], weight)
        pack.close(path[1:])
        pack.close(prefix)


class _PackBuilder:
    """The columns of a pack while tokens are added. What is not added is padding, which attends to padding alone."""

    def __init__(self, length: int, pad_token_id: int) -> None:
        self._num_tokens = 0
        self._token_ids = np.full(length, pad_token_id, dtype=np.int64)
        self._positions = np.zeros((3, length), dtype=np.int64)
        self._seen_until = np.full(length, length, dtype=np.int32)
        self._predict_from: list[Column] = []
        self._targets: list[Column] = []
        self._weights: list[NDArray[np.float32]] = []

    def add(self, tokens: NDArray[np.int32], positions: Column) -> Column:
        """Add tokens and return their indices."""
        start, self._num_tokens = self._num_tokens, self._num_tokens + len(tokens)
        assert self._num_tokens <= len(self._token_ids), (self._num_tokens, len(self._token_ids))
        added = slice(start, self._num_tokens)
        self._token_ids[added], self._positions[:, added] = tokens, positions
        return np.arange(start, self._num_tokens)

    def close(self, indices: Column) -> None:
        """Let no token that is added from now on attend to these."""
        self._seen_until[indices] = self._num_tokens

    def add_targets(self, predict_from: Column, targets: NDArray[np.int32], weight: float) -> None:
        self._predict_from.append(predict_from)
        self._targets.append(targets.astype(np.int64))
        self._weights.append(np.full(len(targets), weight, dtype=np.float32))

    def batch(self) -> Batch:
        return {
            "input_ids": torch.from_numpy(self._token_ids)[None],
            "position_ids": torch.from_numpy(self._positions)[:, None],
            "seen_until": torch.from_numpy(self._seen_until),
            "logits_to_keep": torch.from_numpy(np.concatenate(self._predict_from)),
            "targets": torch.from_numpy(np.concatenate(self._targets))[None],
            "weights": torch.from_numpy(np.concatenate(self._weights))[None],
        }
