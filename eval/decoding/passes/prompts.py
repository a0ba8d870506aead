"""Passes over the packs of prompts, which give the first token of each answer.

Design: packs are made on a thread, ahead of their passes and across waves, so that features are read while the GPU
computes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.eval.decoding.layout import PADDING, WaveLayout, state_rows
from lookonce.eval.decoding.passes.states import OfPrompts
from lookonce.eval.decoding.waves import Room
from lookonce.train.data.batches import Batch, FeatureSource, PackCollator, Prefetcher, image_inputs
from lookonce.train.data.packing import padded_length
from lookonce.train.data.tokenize import ChatTokenizer
from lookonce.train.model.attention import PackMask
from lookonce.train.model.linear_attention import InPack, masks_with
from lookonce.train.model.loss import MASK_KEY

NUM_AHEAD = 2
"""Packs that are made before they are asked for."""
KEPT = ("input_ids", "position_ids", MASK_KEY)
"""What passes need of a collated pack."""
STATE_ROWS = "state_rows"
"""The row of each question's state."""


class PackOfWave(NamedTuple):
    """A pack of a wave, by its number."""

    layout: WaveLayout
    number: int


class Prompts:
    """Computes the prompts of waves with a model, whose attention writes keys and values to their places."""

    def __init__(
        self, model: Any, chat: ChatTokenizer, source: FeatureSource, room: Room, *, flex: bool = False
    ) -> None:
        """With `flex`, attention is FlexAttention on a GPU, which takes seconds to compile; else masks are dense."""
        self._flex = flex and model.device.type == "cuda"
        self._model, self._source, self._room, self._device = model, source, room, model.device
        self._image_token_id = chat.image_token_id
        self._collate = PackCollator.of(chat, source)
        self._mask = PackMask(padded_length(1), self._device, flex=flex)
        self._longest = 0

    def ahead(self, waves: Iterable[Sequence[Dialogue]]) -> Generator[tuple[WaveLayout, Iterator[Batch]]]:
        """The layout of each wave, and the model's inputs for its packs."""
        layouts: deque[WaveLayout] = deque()

        def packs() -> Iterator[list[PackOfWave]]:
            for wave in waves:
                layouts.append(WaveLayout.of(wave, self._image_token_id, self._room))
                yield [PackOfWave(layouts[-1], number) for number in range(len(layouts[-1].packs))]

        with contextlib.closing(Prefetcher(packs(), self._make, self._device, NUM_AHEAD)) as prefetcher:
            while (first := next(batches := prefetcher.step(), None)) is not None:
                yield layouts.popleft(), (batch for batch, _ in chain([first], batches))

    def run(self, batches: Iterable[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of each answer's first token `[N, vocabulary]`, and its position `[N]`."""
        logits, positions = [], []
        for batch in batches:
            self._reserve(len(batch[MASK_KEY]))
            attention_mask = self._masks(batch.pop(MASK_KEY), batch["logits_to_keep"], batch.pop(STATE_ROWS))
            logits.append(self._model(**batch, attention_mask=attention_mask, use_cache=False).logits[0])
            positions.append(batch["position_ids"][0, 0, batch["logits_to_keep"]] + 1)
        return torch.cat(logits), torch.cat(positions)

    def _masks(self, seen_until: torch.Tensor, last: torch.Tensor, rows: torch.Tensor) -> Any:
        """The model's `attention_mask`; `last` and `rows` are those of each question."""
        return masks_with(
            self._model, self._mask(seen_until), lambda: OfPrompts(InPack.of(self._model, seen_until), last, rows)
        )

    def _reserve(self, length: int) -> None:
        """Make room in the mask; one mask serves all packs, since passes are compiled for its function."""
        if length > self._longest:
            self._longest = padded_length(max(length, self._room.tokens_per_pack))
            self._mask = PackMask(self._longest, self._device, flex=self._flex)

    def _make(self, pack_of_wave: PackOfWave) -> Batch:
        layout, number = pack_of_wave
        prompts = [dialogue.first for dialogue in layout.dialogues]
        pack, of_pack = layout.packs[number], layout.of_packs[number]
        length = padded_length(pack.num_tokens) if self._flex else pack.num_tokens
        batch = self._collate(pack.groups, prompts, [0.0] * pack.num_samples, length)
        places = torch.full((length,), PADDING)
        places[: len(of_pack.places)] = torch.from_numpy(of_pack.places)
        text = {name: batch[name] for name in KEPT}
        rows = state_rows(torch.from_numpy(of_pack.examples))
        text |= {"places": places, "logits_to_keep": torch.from_numpy(of_pack.last), STATE_ROWS: rows}
        shown = [key for group in pack.groups for key in prompts[group.examples[0]].image_keys]
        on_device = {name: tensor.to(self._device, non_blocking=True) for name, tensor in text.items()}
        return on_device | image_inputs(self._source, shown, self._device)
