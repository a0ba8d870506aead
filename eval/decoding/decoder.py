"""Answer a wave of questions: its prompts in packs, then one token of every answer in each pass.

Design: which token attends to which is the rule of training (`train.model.attention.attends`), in packs by their
indices and in the buffer by places. The positions of an answer continue from its prompt. So each answer has the tokens
that `generate` gives in a conversation of its own, apart from rounding, while the tokens of an image are computed once.
Answers that have ended leave the wave, which makes the later passes smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.branches import UNUSED, Branches
from lookonce.eval.decoding.key_values import KeyValues
from lookonce.eval.decoding.waves import Layout, Room, packs_of
from lookonce.train.data.collate_packs import PackCollator
from lookonce.train.data.features import Batch, FeatureSource, image_inputs
from lookonce.train.data.packing import Pack, padded_length
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model.attention import PackMask, attends
from lookonce.train.model.compile import training_on_packs

STEPS_BETWEEN_CHECKS = 8
"""Passes on a GPU after which the CPU asks which answers have ended; each time the GPU has to wait."""


class Decoder:
    """Greedy answers of a model, which may have an adapter, to waves of questions."""

    def __init__(self, model: Any, chat: ChatTokenizer, source: FeatureSource, room: Room, dtype: torch.dtype) -> None:
        """Passes run under autocast to `dtype`, unless that is float32."""
        self.model, self.chat, self.source, self.room, self.dtype = model, chat, source, room, dtype
        self.device: torch.device = model.device
        self.pads_to_blocks = self.device.type == "cuda"
        tokenizer = chat.tokenizer
        self._collate = PackCollator(chat.image_token_id, tokenizer.pad_token_id, chat.merge_size, source.grid_thw)

    @torch.inference_mode()
    def answers(self, wave: Sequence[Example]) -> list[Answer]:
        """The answers to the questions of a wave, in order."""
        packs = packs_of(wave, self.chat.image_token_id, self.room.tokens_per_pack)
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with autocast, training_on_packs(self.model, compiled=False):
            answers = dict(self._answers(packs, wave))
        return [answers[number] for number in range(len(wave))]

    def _answers(self, packs: Sequence[Pack], examples: Sequence[Example]) -> Iterator[tuple[int, Answer]]:
        layouts, segments = self._lay_out(packs)
        keys = KeyValues(len(segments))
        branches, logits = self._prompts(packs, layouts, examples, keys)
        branches.add(0, logits, self.end_token_id)
        every = STEPS_BETWEEN_CHECKS if self.device.type == "cuda" else 1
        for number in range(1, self.room.max_new_tokens):
            if number % every == 0 or every == 1:
                yield from self._taken(branches, branches.ended)
                branches = branches.subset((~branches.ended).nonzero().flatten())
                if not len(branches.ended):
                    return
            branches.add(number, self._step(branches, number, keys, segments), self.end_token_id)
        yield from self._taken(branches, torch.ones_like(branches.ended))

    @property
    def end_token_id(self) -> int:
        return int(self.chat.tokenizer.eos_token_id)

    def _lay_out(self, packs: Sequence[Pack]) -> tuple[list[Layout], torch.Tensor]:
        """The layout of each pack, and the segment of each place; the last place is for padding."""
        layouts: list[Layout] = []
        num_places = num_segments = 0
        for pack in packs:
            layouts.append(Layout.of(pack, num_places, num_segments, self.room.max_new_tokens))
            num_places += len(layouts[-1].segments)
            num_segments += sum(1 + len(group.examples) for group in pack.groups)
        found = [torch.from_numpy(layout.segments) for layout in layouts]
        return layouts, torch.cat([*found, torch.tensor([UNUSED])]).to(self.device)

    def _prompts(
        self, packs: Sequence[Pack], layouts: Sequence[Layout], examples: Sequence[Example], keys: KeyValues
    ) -> tuple[Branches, torch.Tensor]:
        """Compute all prompts; returns their branches, and the logits of the first token of each answer."""
        lengths = [padded_length(pack.num_tokens) if self.pads_to_blocks else pack.num_tokens for pack in packs]
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
        size = (len(positions), self.room.max_new_tokens)
        return Branches(
            examples=column("examples"),
            segment=column("branch"),
            prefix=column("prefix"),
            place=torch.cat(next_places).to(self.device),
            position=positions,
            tokens=torch.full(size, self.end_token_id, device=self.device),
            logprobs=torch.zeros(size, device=self.device),
            ended=torch.zeros(len(positions), dtype=torch.bool, device=self.device),
        )

    def _step(self, branches: Branches, number: int, keys: KeyValues, segments: torch.Tensor) -> torch.Tensor:
        """The logits of token `number` of each answer, which follows from the tokens before it."""
        keys.places, keys.is_whole = branches.place, True
        places = torch.arange(len(segments), device=self.device)
        segment, prefix, place = (column[:, None] for column in (branches.segment, branches.prefix, branches.place))
        allowed = attends(segment, prefix, place, segments[None], places[None])
        logits: torch.Tensor = self.model(
            input_ids=branches.tokens[None, :, number - 1],
            position_ids=branches.position.expand(3, 1, -1),
            attention_mask=allowed[None, None],
            past_key_values=keys,
            use_cache=False,
        ).logits[0]
        branches.place += 1
        branches.position += 1
        return logits

    def _taken(self, branches: Branches, chosen: torch.Tensor) -> Iterator[tuple[int, Answer]]:
        """The answers of some branches, as far as they have grown."""
        done = branches.subset(chosen.nonzero().flatten())
        columns = (done.examples, done.tokens, done.logprobs)
        for number, tokens, logprobs in zip(*(column.tolist() for column in columns), strict=True):
            yield number, Answer.of(tokens, logprobs, self.chat.tokenizer)
