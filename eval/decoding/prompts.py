"""Passes over the packs of a wave's prompts, which give the first token of each answer.

Design: packs are collated on a thread, so that features are read while the GPU computes the pack before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from lookonce.eval.decoding.layout import PackLayout, WaveLayout
from lookonce.train.data.collate_packs import PackCollator
from lookonce.train.data.features import Batch, FeatureSource, image_inputs
from lookonce.train.data.packing import Pack, padded_length
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model.attention import PackMask

KEPT = ("input_ids", "position_ids", "segment", "prefix")
"""What passes need of a collated pack."""


class Prompts:
    """Computes prompts with a model, whose attention writes keys and values to their places."""

    def __init__(self, model: Any, chat: ChatTokenizer, source: FeatureSource) -> None:
        self._model, self._source, self._device = model, source, model.device
        self._collate = PackCollator(chat.image_token_id, chat.tokenizer.pad_token_id, chat.merge_size, source.grid_thw)
        self._mask = PackMask(padded_length(1), self._device)
        self._longest = 0

    def run(
        self, layout: WaveLayout, examples: Sequence[Example], padding_place: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of each answer's first token `[N, vocabulary]`, and its position `[N]`."""
        logits, positions = [], []
        self._reserve(max(pack.num_tokens for pack in layout.packs))
        for batch in self._batches(layout, examples, padding_place):
            attention_mask = self._mask(batch.pop("segment"), batch.pop("prefix"))
            last = batch["logits_to_keep"]
            logits.append(self._model(**batch, attention_mask=attention_mask, use_cache=False).logits[0])
            positions.append(batch["position_ids"][0, 0, last] + 1)
        return torch.cat(logits), torch.cat(positions)

    def _reserve(self, num_tokens: int) -> None:
        """Make room in the mask; one mask serves all packs, since passes are compiled for its function."""
        if num_tokens > self._longest:
            self._longest = padded_length(num_tokens)
            self._mask = PackMask(self._longest, self._device)

    def _batches(self, layout: WaveLayout, examples: Sequence[Example], padding_place: int) -> Iterator[Batch]:
        """The model's inputs for each pack; one is made ahead."""
        with ThreadPoolExecutor(1, "prompts") as thread:
            made = [
                thread.submit(self._batch, pack, of_pack, examples, padding_place)
                for pack, of_pack in zip(layout.packs, layout.of_packs, strict=True)
            ]
            for batch in made:
                yield batch.result()

    def _batch(self, pack: Pack, layout: PackLayout, examples: Sequence[Example], padding_place: int) -> Batch:
        on_gpu = self._device.type == "cuda"
        length = padded_length(pack.num_tokens) if on_gpu else pack.num_tokens
        batch = self._collate(pack.groups, examples, [0.0] * pack.num_samples, length)
        places = torch.full((length,), padding_place)
        places[: len(layout.places)] = torch.from_numpy(layout.places)
        text = {name: batch[name] for name in KEPT} | {
            "places": places,
            "logits_to_keep": torch.from_numpy(layout.last),
        }
        shown = [key for group in pack.groups for key in examples[group.examples[0]].image_keys]
        with torch.inference_mode():
            on_device = {name: tensor.to(self._device, non_blocking=True) for name, tensor in text.items()}
            return on_device | image_inputs(self._source, shown, self._device)
