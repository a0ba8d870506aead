"""From micro-batches to batches on the device: the features of images, and texts as padded rows or as packs.

Training reads cached features. `Pixels` decodes and preprocesses every image of every batch, for a model with its
tower: the baseline in tests and in `lookonce bench step`.

Only positions whose next token is a target go through the language model's head: `logits_to_keep` lists the columns
where at least one row has a target, and `targets` and `weights` have those columns only. With a vocabulary of 151,936
this saves most of the memory of a batch with short answers.

Rows, one per example, are padded on the right for training and on the left for generation. Images follow one another
without padding. A pack is one row: each group's prefix once, then its branches, whose positions continue from the end
of the prefix. A branch that shares its first tokens with the one before it adds the others only, so the pack is a tree
in depth-first order: what continues a token lies behind it, up to where it is closed. The first own token of a branch
is predicted from the last token before it, so `logits_to_keep` may list that index several times.

mRoPE positions are those of `get_rope_index` in transformers' models/qwen3_vl/modeling_qwen3_vl.py, for a prefix only.
Text tokens count up on all three axes (time, height, width). An image's tokens lie on a grid that starts at the next
text position, and the text after it starts behind the longer side of the grid.

One thread reads features (with the cache's own threads, into page-locked memory), collates them and, on a GPU, copies
them on a stream of its own, some micro-batches ahead. It serves as well as processes would, since it releases the GIL
almost all the time, and no data is copied between processes. The time that training waits for batches is counted.

Shapes: `B` rows, `T` tokens per row with padding, `L` tokens of a pack with padding, `K` columns or targets.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from lookonce.cache.format import Grid
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.reader import VisionCache
from lookonce.train.data.packing import Group
from lookonce.train.data.tokenize import ChatTokenizer, Example

CPU = torch.device("cpu")
Batch = dict[str, torch.Tensor]
IGNORED = -100
"""Target of a position that predicts nothing."""
Column = NDArray[np.int64]
NO_TOKEN = -1
"""Stands before the first token of a conversation without images, which no token predicts."""
T = TypeVar("T")
"""What a batch is made of."""
Item = tuple[Batch, "torch.cuda.Event | None", bool] | Exception | None
"""A batch, when it is on the device and whether it is its step's last; or an error; or None after the last step."""


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


class FeatureSource(Protocol):
    """Provides the model's `pixel_values`, and the patch grid of each image."""

    has_tower: ClassVar[bool]
    """Whether the model has its tower, which needs the grids on the device. Otherwise grids stay on the CPU, where
    reading them forces no host-device sync."""

    def grid_thw(self, key: str) -> Grid:
        """An image's patch grid: time, height, width."""
        ...

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        """The images one after another, without padding, on a device.

        Shapes: features `[num_tokens, num_levels, hidden]`, patches `[num_patches, patch_dim]`.
        """
        ...


def image_inputs(source: FeatureSource, keys: Sequence[str], device: torch.device = CPU) -> Batch:
    """The model's inputs for these images; empty if there are none."""
    if not keys:
        return {}
    grids = torch.tensor([source.grid_thw(key) for key in keys], device=device if source.has_tower else CPU)
    return {"pixel_values": source.load(keys, device), "image_grid_thw": grids}


class CachedFeatures:
    """Features from the cache, for a model with `CachedVisionTower`; each image of a batch is read once."""

    has_tower: ClassVar[bool] = False

    def __init__(self, cache: VisionCache) -> None:
        self.cache = cache
        self.bytes_read = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return CachedFeatures, (self.cache,)  # a lock stays in its process

    def grid_thw(self, key: str) -> Grid:
        return self.cache.grid_thw(key)

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        distinct = list(dict.fromkeys(keys))
        with self._lock:
            read = self.cache.get_many(distinct, pin=device.type == "cuda")
            self.bytes_read += sum(tensor.nbytes for tensor in read)
        on_device = {key: tensor.to(device, non_blocking=True) for key, tensor in zip(distinct, read, strict=True)}
        return torch.cat([on_device[key] for key in keys])


class Pixels:
    """Patches made from the image files every time, for a stock model."""

    has_tower: ClassVar[bool] = True

    def __init__(self, processor: ImageProcessor, path_of: Mapping[str, Path]) -> None:
        self.processor, self.path_of = processor, path_of
        self._grids: dict[str, Grid] = {}

    def grid_thw(self, key: str) -> Grid:
        if key not in self._grids:
            self._grids[key] = self.processor.read(self.path_of[key])[1]
        return self._grids[key]

    def load(self, keys: Sequence[str], device: torch.device = CPU) -> torch.Tensor:
        return torch.cat([self.processor.read(self.path_of[key])[0] for key in keys]).to(device)


@dataclass(frozen=True)
class RowCollator:
    source: FeatureSource
    image_token_id: int
    pad_token_id: int

    @classmethod
    def of(cls, chat: ChatTokenizer, source: FeatureSource) -> RowCollator:
        """The collator of a model's tokens, whose images a source has."""
        return cls(source, chat.image_token_id, chat.tokenizer.pad_token_id)

    def __call__(self, examples: Sequence[Example]) -> Batch:
        """A training batch with images, whose loss is the mean over its targets."""
        num_targets = sum(example.num_targets for example in examples)
        text = self.text_batch(examples, [1 / max(num_targets, 1)] * len(examples))
        return text | image_inputs(self.source, image_keys(examples))

    def text_batch(self, examples: Sequence[Example], target_weights: Sequence[float]) -> Batch:
        """A training batch without images. `target_weights` has one weight per example, for each of its targets.

        `input_ids`, `attention_mask`, `mm_token_type_ids` `[B, T]`; `logits_to_keep` `[K]`: columns to predict from;
        `targets`, `weights` `[B, K]`: the tokens to predict there (`IGNORED` where there is none) and their weights.
        """
        rows = [example.expanded(self.image_token_id) for example in examples]
        input_ids = self._pad([ids for ids, _ in rows], self.pad_token_id)
        supervised = self._pad([flags for _, flags in rows], 0).bool()
        targets = torch.where(supervised, input_ids, IGNORED)[:, 1:]
        columns = (targets != IGNORED).any(dim=0).nonzero().flatten()
        batch = self._text(input_ids, self._pad([np.ones_like(ids) for ids, _ in rows], 0))
        batch["logits_to_keep"], batch["targets"] = columns, targets[:, columns]
        row_weights = torch.tensor(target_weights, dtype=torch.float32)[:, None]
        return batch | {"weights": (batch["targets"] != IGNORED) * row_weights}

    def prompts(self, examples: Sequence[Example]) -> Batch:
        """A batch to generate from, with images: prompts `[B, T]`, padded on the left."""
        rows = [example.expanded(self.image_token_id)[0] for example in examples]
        input_ids = self._pad(rows, self.pad_token_id, left=True)
        attention_mask = self._pad([np.ones_like(ids) for ids in rows], 0, left=True)
        return self._text(input_ids, attention_mask) | image_inputs(self.source, image_keys(examples))

    def _text(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Batch:
        is_image = (input_ids == self.image_token_id).int()
        return {"input_ids": input_ids, "attention_mask": attention_mask, "mm_token_type_ids": is_image}

    @staticmethod
    def _pad(rows: Sequence[np.ndarray], value: int, left: bool = False) -> torch.Tensor:
        length = max(len(row) for row in rows)
        sides = [(length - len(row), 0) if left else (0, length - len(row)) for row in rows]
        tensors = [torch.from_numpy(row.astype(np.int64)) for row in rows]
        return torch.stack([pad(tensor, side, value=value) for tensor, side in zip(tensors, sides, strict=True)])


def image_keys(examples: Sequence[Example]) -> list[str]:
    """The keys of the images of some examples, in the order in which the model expects them."""
    return [key for example in examples for key in example.image_keys]


@dataclass(frozen=True)
class PackCollator:
    image_token_id: int
    pad_token_id: int
    merge_size: int
    source: FeatureSource

    @classmethod
    def of(cls, chat: ChatTokenizer, source: FeatureSource) -> PackCollator:
        return cls(chat.image_token_id, chat.tokenizer.pad_token_id, chat.merge_size, source)

    def __call__(
        self,
        groups: Sequence[Group],
        examples: Sequence[Example] | Mapping[int, Example],
        target_weights: Sequence[float],
        length: int,
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

    def _add(
        self,
        pack: _PackBuilder,
        group: Group,
        examples: Sequence[Example] | Mapping[int, Example],
        weights: Sequence[float],
    ) -> None:
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


class Prefetcher(Generic[T]):
    """Makes the batches of steps, `num_ahead` of them before they are asked for."""

    def __init__(
        self, steps: Iterator[list[T]], make: Callable[[T], Batch], device: torch.device, num_ahead: int
    ) -> None:
        self.wait_seconds = 0.0
        """Time spent waiting for batches so far."""
        self._steps, self._make, self._device = steps, make, device
        self._queue: queue.Queue[Item] = queue.Queue(num_ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def step(self) -> Iterator[tuple[Batch, bool]]:
        """The next step's batches, each with whether it is the step's last. Empty after the last step.

        The batches of the previous step must have been used up.
        """
        is_last = False
        while not is_last:
            start = time.perf_counter()
            item = self._queue.get()
            self.wait_seconds += time.perf_counter() - start
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            batch, ready, is_last = item
            if ready is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(ready)
                for value in batch.values():
                    if isinstance(value, torch.Tensor) and value.is_cuda:
                        value.record_stream(stream)
            yield batch, is_last

    def close(self) -> None:
        """End the thread and drop the batches that are ready."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _run(self) -> None:
        try:
            stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
            for step in self._steps:
                for number, micro_batch in enumerate(step, start=1):
                    with torch.cuda.stream(stream) if stream else nullcontext():
                        batch, ready = self._make(micro_batch), stream.record_event() if stream else None
                    self._queue.put((batch, ready, number == len(step)))
                    if self._closed.is_set():
                        return
            self._queue.put(None)
        except Exception as error:  # raised by `step`, where the batch is asked for
            self._queue.put(error)
