"""A pack to tensors: each image's prefix once, then its branches, one after the other in a single row.

Design: a branch's positions go on where its prefix ended, so each of its tokens has the position that it has in a
conversation of its own; who attends to whom follows from the runs (attention.py). A branch whose first token is
supervised is predicted from the last token of the prefix, which may then be asked for several predictions: so
`logits_to_keep` can name a place more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lookonce.cache.store.receipts import Grid
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
        self, groups: Sequence[Group], examples: Sequence[Example], weights: Sequence[float], length: int
    ) -> Batch:
        """One pack, padded to `length` tokens `L`, `K` of them to be predicted.

        `weights` says for each example, in the order of `groups`, what each of its supervised tokens counts.
        `input_ids` is `[1, L]`, `position_ids` `[3, 1, L]`; `run` and `prefix` `[L]` say of each token which run it is
        in and which run is that one's prefix; `logits_to_keep` `[K]` are the places to predict from, `targets` and
        `weights` `[1, K]` what to predict there and what it counts.
        """
        pack = _Pack()
        of_example = iter(weights)
        for group in groups:
            self._add(pack, group, examples, [next(of_example) for _ in group.examples])
        return pack.batch(length, self.pad_token_id)

    def _add(self, pack: _Pack, group: Group, examples: Sequence[Example], weights: Sequence[float]) -> None:
        first = examples[group.examples[0]]
        head = first.token_ids[: group.len_prefix]
        grids = [self.grid_of(key) for key in first.image_keys]
        positions, start = prefix_positions(head, self.image_token_id, grids, self.merge_size)
        repeats = np.ones(len(head), dtype=np.int64)
        repeats[head == self.image_token_id] = first.num_image_tokens
        prefix = pack.add(np.repeat(head, repeats).astype(np.int64), positions)
        last = pack.length - 1
        for number, weight in zip(group.examples, weights, strict=True):
            branch = examples[number].token_ids[group.len_prefix :].astype(np.int64)
            places = np.arange(start, start + len(branch))
            predicted = np.flatnonzero(examples[number].supervised[group.len_prefix :])
            before = np.where(predicted > 0, pack.length + predicted - 1, last)
            pack.predict(before, branch[predicted], weight)
            pack.add(branch, np.broadcast_to(places, (3, len(branch))), prefix)


class _Pack:
    """The columns of a pack while it is filled."""

    def __init__(self) -> None:
        self.length = self._num_runs = 0
        self._tokens: list[Column] = []
        self._positions: list[Column] = []
        self._runs: list[tuple[int, int, int]] = []
        """Length, number, number of the prefix."""
        self._places: list[Column] = []
        self._targets: list[Column] = []
        self._weights: list[NDArray[np.float32]] = []

    def add(self, tokens: Column, positions: Column, prefix: int | None = None) -> int:
        """Add a run; gives its number. Without a prefix it is one, its own."""
        number = self._num_runs
        self._num_runs += 1
        self._tokens.append(tokens)
        self._positions.append(positions)
        self._runs.append((len(tokens), number, number if prefix is None else prefix))
        self.length += len(tokens)
        return number

    def predict(self, places: Column, targets: Column, weight: float) -> None:
        self._places.append(places)
        self._targets.append(targets)
        self._weights.append(np.full(len(targets), weight, dtype=np.float32))

    def batch(self, length: int, pad_token_id: int) -> Batch:
        assert self.length <= length, (self.length, length)
        padding = length - self.length
        self.add(np.full(padding, pad_token_id), np.zeros((3, padding), dtype=np.int64))
        lengths, runs, prefixes = np.array(self._runs).T
        return {
            "input_ids": torch.from_numpy(np.concatenate(self._tokens))[None],
            "position_ids": torch.from_numpy(np.concatenate(self._positions, axis=1))[:, None],
            "run": torch.from_numpy(np.repeat(runs, lengths).astype(np.int32)),
            "prefix": torch.from_numpy(np.repeat(prefixes, lengths).astype(np.int32)),
            "logits_to_keep": torch.from_numpy(np.concatenate(self._places)),
            "targets": torch.from_numpy(np.concatenate(self._targets))[None],
            "weights": torch.from_numpy(np.concatenate(self._weights))[None],
        }
