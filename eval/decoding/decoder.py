"""Answer a wave of questions: its prompts in packs, then one token of every answer in each pass.

Design: which token attends to which is the rule of training (`train.model.attention.attends`), in packs by their
indices and in the buffer by places. The positions of an answer continue from its prompt. So each answer has the tokens
that `generate` gives in a conversation of its own, apart from rounding, while the tokens of an image are computed once.
Answers that have ended leave the wave, which makes the later passes smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.branches import UNUSED, Branches
from lookonce.eval.decoding.key_values import KeyValues
from lookonce.eval.decoding.row_steps import Rows, RowSteps
from lookonce.eval.decoding.steps import DenseSteps
from lookonce.eval.decoding.waves import Layout, Room, packs_of
from lookonce.train.data.collate_packs import PackCollator
from lookonce.train.data.features import Batch, FeatureSource, image_inputs
from lookonce.train.data.packing import BLOCK, Pack, padded_length
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.cuda_graphs import cuda_graph_capture

STEPS_BETWEEN_CHECKS = 4
"""Passes on a GPU after which the CPU asks whether all answers have ended; each time the GPU has to wait."""


class Decoder:
    """Greedy answers of a model, which may have an adapter, to waves of questions."""

    def __init__(
        self,
        model: Any,
        chat: ChatTokenizer,
        source: FeatureSource,
        room: Room,
        dtype: torch.dtype,
        *,
        by_rows: bool | None = None,
    ) -> None:
        """Passes run under autocast to `dtype`, unless that is float32.

        `by_rows` chooses the passes of row_steps.py, by default on a GPU.
        """
        self.model, self.chat, self.source, self.room, self.dtype = model, chat, source, room, dtype
        self.device: torch.device = model.device
        self.end_token_id = int(chat.tokenizer.eos_token_id)
        self._on_gpu = self.device.type == "cuda"
        self._by_rows = self._on_gpu if by_rows is None else by_rows
        self._collate = PackCollator(chat.image_token_id, chat.tokenizer.pad_token_id, chat.merge_size, source.grid_thw)
        self._row_steps: RowSteps | None = None
        self._keys: KeyValues | None = None

    @torch.inference_mode()
    def answers(self, wave: Sequence[Example]) -> list[Answer]:
        """The answers to the questions of a wave, in order."""
        with self._passes():
            branches, layouts, segments, keys = self._begin(wave)
            grow = self._grow_by_rows if self._by_rows else self._grow
            done = grow(branches, layouts, segments, keys)
            answers = dict(answer for branches in done for answer in self._taken(branches))
        return [answers[number] for number in range(len(wave))]

    @torch.inference_mode()
    def first_tokens(self, wave: Sequence[Example]) -> torch.Tensor:
        """The first token of each answer, which is known when the prompts have been computed."""
        with self._passes():
            return self._begin(wave)[0].latest

    @contextlib.contextmanager
    def _passes(self) -> Iterator[None]:
        """The precision and the attention of passes."""
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with autocast, training_on_packs(self.model, compiled=False):
            yield

    def _begin(self, wave: Sequence[Example]) -> tuple[Branches, list[Layout], torch.Tensor, KeyValues]:
        """Compute a wave's prompts; its branches have the first token of each answer."""
        packs = packs_of(wave, self.chat.image_token_id, self.room.tokens_per_pack)
        layouts, segments = self._lay_out(packs)
        keys = self._buffer(len(segments))
        branches, logits = self._prompts(packs, layouts, wave, keys)
        branches.add(torch.tensor([0], device=self.device), logits, self.end_token_id)
        return branches, layouts, segments, keys

    def _grow(
        self, branches: Branches, layouts: Sequence[Layout], segments: torch.Tensor, keys: KeyValues
    ) -> Iterator[Branches]:
        """Let answers grow with dense masks; yields branches when they have ended."""
        steps = DenseSteps(self.model, keys, self.end_token_id)
        steps.start(branches, segments)
        for number in range(1, self.room.max_new_tokens):
            yield steps.drop_ended()
            if not len(steps.branches.ended):
                return
            steps.run(number)
        yield steps.branches

    def _grow_by_rows(
        self, branches: Branches, layouts: Sequence[Layout], segments: torch.Tensor, keys: KeyValues
    ) -> Iterator[Branches]:
        """Let all answers grow until the last has ended."""
        rows = Rows.of(layouts)
        steps = self._steps_for(len(branches.ended), len(rows.first), keys)
        steps.start(branches, segments, rows)
        for number in range(1, self.room.max_new_tokens):
            if number % STEPS_BETWEEN_CHECKS == 1 and bool(steps.branches.ended.all()):
                break
            steps.run(number)
        yield steps.branches.subset(torch.arange(len(branches.ended), device=self.device))

    def _steps_for(self, num_branches: int, num_blocks: int, keys: KeyValues) -> RowSteps:
        """Passes with room for these branches and blocks of rows; those of the waves before if they have it."""
        steps = self._row_steps
        if steps is None or len(steps.branches.ended) < num_branches or steps.num_blocks < num_blocks:
            unused = Branches.unused(
                padded(num_branches, 64),
                keys.num_places - 1,
                self.room.max_new_tokens,
                self.end_token_id,
                self.device,
            )
            capture = cuda_graph_capture() if self._on_gpu else None
            steps = RowSteps(self.model, keys, self.end_token_id, unused, padded(num_blocks, 16), capture)
            self._row_steps = steps
        return steps

    def _buffer(self, num_places: int) -> KeyValues:
        """The buffer of a wave: one of its own, or the one of all waves, whose last block is for padding."""
        if not self._by_rows:
            return KeyValues(num_places + 1)
        if self._keys is None or self._keys.num_places < num_places + BLOCK:
            self._keys = KeyValues(padded(max(num_places, self.room.num_places), BLOCK) + BLOCK)
            self._row_steps = None
        return self._keys

    def _lay_out(self, packs: Sequence[Pack]) -> tuple[list[Layout], torch.Tensor]:
        """The layout of each pack, and the segment of each place."""
        layouts: list[Layout] = []
        num_places = num_segments = 0
        for pack in packs:
            layouts.append(Layout.of(pack, num_places, num_segments, self.room.max_new_tokens))
            num_places += len(layouts[-1].segments)
            num_segments += sum(1 + len(group.examples) for group in pack.groups)
        segments = np.concatenate([layout.segments for layout in layouts])
        return layouts, torch.from_numpy(segments).to(self.device)

    def _prompts(
        self, packs: Sequence[Pack], layouts: Sequence[Layout], examples: Sequence[Example], keys: KeyValues
    ) -> tuple[Branches, torch.Tensor]:
        """Compute all prompts; returns their branches, and the logits of the first token of each answer."""
        lengths = [padded_length(pack.num_tokens) if self._on_gpu else pack.num_tokens for pack in packs]
        mask = PackMask(padded_length(max(lengths)), self.device)
        keys.is_whole = False
        logits, positions = [], []
        for pack, layout, length in zip(packs, layouts, lengths, strict=True):
            batch = self._batch(pack, examples, length)
            places = torch.full((length,), keys.num_places - 1)
            places[: len(layout.places)] = torch.from_numpy(layout.places)
            keys.places = places.to(self.device, non_blocking=True)
            last = torch.from_numpy(layout.last).to(self.device)
            attention_mask = mask(batch.pop("segment"), batch.pop("prefix"))
            found = self.model(
                **batch, attention_mask=attention_mask, past_key_values=keys, use_cache=False, logits_to_keep=last
            )
            logits.append(found.logits[0])
            positions.append(batch["position_ids"][0, 0, last] + 1)
        return self._branches(layouts, torch.cat(positions)), torch.cat(logits)

    def _batch(self, pack: Pack, examples: Sequence[Example], length: int) -> Batch:
        """The model's inputs for a pack, with its segments and prefixes."""
        batch = self._collate(pack.groups, examples, [0.0] * pack.num_samples, length)
        kept = ("input_ids", "position_ids", "segment", "prefix")
        shown = [key for group in pack.groups for key in examples[group.examples[0]].image_keys]
        text = {name: batch[name].to(self.device, non_blocking=True) for name in kept}
        return text | image_inputs(self.source, shown, self.device)

    def _branches(self, layouts: Sequence[Layout], positions: torch.Tensor) -> Branches:
        def column(name: str) -> torch.Tensor:
            return torch.cat([torch.from_numpy(getattr(layout, name)) for layout in layouts]).to(self.device)

        next_places = [torch.from_numpy(layout.places[layout.last] + 1) for layout in layouts]
        branches = Branches.unused(len(positions), UNUSED, self.room.max_new_tokens, self.end_token_id, self.device)
        return replace(
            branches,
            examples=column("examples"),
            segment=column("branch"),
            prefix=column("prefix"),
            place=torch.cat(next_places).to(self.device),
            position=positions,
            ended=torch.zeros_like(branches.ended),
        )

    def _taken(self, done: Branches) -> Iterator[tuple[int, Answer]]:
        """The answers of branches that have ended."""
        columns = (done.examples, done.tokens, done.logprobs)
        for number, tokens, logprobs in zip(*(column.tolist() for column in columns), strict=True):
            yield number, Answer.of(tokens, logprobs, self.chat.tokenizer)


def padded(number: int, multiple: int) -> int:
    """The smallest multiple that is not below a number."""
    return -(-number // multiple) * multiple
