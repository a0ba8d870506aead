"""Answer a wave of questions: its prompts in packs, then one token of every answer in each pass.

Design: which token attends to which is the rule of training (`train.model.attention.attends`), in packs by their
indices and in the buffer by places. The positions of an answer continue from its prompt. So each answer has the tokens
that `generate` gives in a conversation of its own, apart from rounding, while the tokens of an image are computed once.
Answers that have ended leave the wave, which makes the later passes smaller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.attention import PROMPTS, rows_of_block
from lookonce.eval.decoding.branches import UNUSED, Branches
from lookonce.eval.decoding.key_values import KeyValues
from lookonce.eval.decoding.layout import PADDING, WaveLayout
from lookonce.eval.decoding.prompts import Prompts
from lookonce.eval.decoding.row_steps import Rows, RowSteps
from lookonce.eval.decoding.steps import DenseSteps
from lookonce.eval.decoding.waves import Room
from lookonce.train.data.features import Batch, FeatureSource
from lookonce.train.data.packing import BLOCK
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.cuda_graphs import cuda_graph_capture
from lookonce.train.model.load import text_model

STEPS_BETWEEN_CHECKS = 4
"""Passes on a GPU after which the CPU asks which answers have ended; each time the GPU has to wait."""
BRANCHES = 64
"""The numbers of branches in captured passes are multiples of this."""

Grown = tuple[int, list[int], list[float]]
"""The number of a question, and the tokens and log-probabilities of its answer."""


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
        compiled: bool = False,
        by_rows: bool | None = None,
    ) -> None:
        """Passes run under autocast to `dtype`, unless that is float32.

        `compiled` compiles the decoder layers, and on a GPU captures the passes of row_steps.py as CUDA graphs.
        `by_rows` chooses these passes, by default on a GPU.
        """
        self.model, self.chat, self.room, self.dtype = model, chat, room, dtype
        self.device: torch.device = model.device
        self.end_token_id = int(chat.tokenizer.eos_token_id)
        on_gpu = self.device.type == "cuda"
        self._compiled, self._by_rows = compiled, on_gpu if by_rows is None else by_rows
        self._capture = cuda_graph_capture() if on_gpu and compiled else None
        self._prompts = Prompts(model, chat, source, room)
        self._keys: KeyValues | None = None
        self._steps: list[RowSteps] = []

    def answers(self, waves: Iterable[Sequence[Example]]) -> Generator[list[Answer]]:
        """The answers to the questions of each wave, in order.

        Texts are decoded, and used by the caller, while the GPU computes the prompts of the next wave.
        """
        done: list[Grown] = []
        try:
            for layout, branches, keys in self._begun(waves):
                if done:
                    yield self._read(done)
                done = []
                done = self._finished(layout, branches, keys)
        except torch.OutOfMemoryError:
            if done:
                yield self._read(done)
            raise
        if done:
            yield self._read(done)

    def first_tokens(self, waves: Iterable[Sequence[Example]]) -> Iterator[torch.Tensor]:
        """The first token of each answer, which is known when the prompts have been computed."""
        for _, branches, _ in self._begun(waves):
            yield branches.latest

    def _begun(self, waves: Iterable[Sequence[Example]]) -> Iterator[tuple[WaveLayout, Branches, KeyValues]]:
        """Compute the prompts of each wave."""
        with contextlib.closing(self._prompts.ahead(waves)) as ahead:
            for layout, batches in ahead:
                keys = self._buffer(len(layout.segments))
                with self._passes(keys):
                    branches = self._begin(layout, batches)
                yield layout, branches, keys

    def _finished(self, layout: WaveLayout, branches: Branches, keys: KeyValues) -> list[Grown]:
        """Let the answers of a wave grow to their end; in the order of their questions."""
        grow = self._grow_by_rows if self._by_rows else self._grow
        with self._passes(keys):
            done = list(grow(branches, layout, keys))
            columns = [(some.examples.tolist(), some.tokens.tolist(), some.logprobs.tolist()) for some in done]
        return sorted(answer for some in columns for answer in zip(*some, strict=True))

    def _read(self, done: Sequence[Grown]) -> list[Answer]:
        return [Answer.of(tokens, logprobs, self.chat.tokenizer) for _, tokens, logprobs in done]

    @contextlib.contextmanager
    def _passes(self, keys: KeyValues) -> Iterator[None]:
        """The precision, the attention and the buffers of passes.

        Autocast keeps no casts of weights: they would be freed at the end, and captured passes would read them later.
        """
        inference = torch.inference_mode()
        is_on = self.dtype != torch.float32
        autocast = torch.autocast(self.device.type, self.dtype, enabled=is_on, cache_enabled=False)
        on_packs = training_on_packs(self.model, compiled=self._compiled, attention=PROMPTS)
        with inference, autocast, on_packs, keys.attached():
            yield

    def _begin(self, layout: WaveLayout, batches: Iterable[Batch]) -> Branches:
        """Compute a wave's prompts; its branches have the first token of each answer."""
        logits, positions = self._prompts.run(batches)

        def column(name: str) -> torch.Tensor:
            return torch.from_numpy(layout.column(name)).to(self.device)

        branches = replace(
            Branches.unused(len(positions), UNUSED, self.room.max_new_tokens, self.end_token_id, self.device),
            examples=column("examples"),
            segment=column("branch"),
            prefix=column("prefix"),
            place=column("last_place") + 1,
            position=positions,
            ended=torch.zeros(len(positions), dtype=torch.bool, device=self.device),
        )
        branches.add(torch.tensor([0], device=self.device), logits, self.end_token_id)
        return branches

    def _grow(self, branches: Branches, layout: WaveLayout, keys: KeyValues) -> Iterator[Branches]:
        """Let answers grow with dense masks; yields branches when they have ended."""
        steps = DenseSteps(self.model, self.end_token_id)
        steps.start(branches, torch.from_numpy(layout.segments).to(self.device))
        for number in range(1, self.room.max_new_tokens):
            yield steps.drop_ended()
            if not len(steps.branches.ended):
                return
            steps.run(number)
        yield steps.branches

    def _grow_by_rows(self, branches: Branches, layout: WaveLayout, keys: KeyValues) -> Iterator[Branches]:
        """Let answers grow in passes of a few sizes; yields branches when they have ended and leave the wave."""
        segments = torch.from_numpy(layout.segments).to(self.device)
        spans, steps = layout.spans, None
        for number in range(1, self.room.max_new_tokens):
            if number % STEPS_BETWEEN_CHECKS == 1:
                grows = ~branches.ended.cpu().numpy()
                if steps is None or 2 * capacity(grows.sum()) <= steps.num_branches:
                    chosen = torch.from_numpy(grows).to(self.device)
                    yield branches.subset(~chosen)
                    branches, spans = branches.subset(chosen), spans.subset(grows)
                    if not grows.any():
                        return
                    rows = Rows.of(spans, rows_of_block(text_model(self.model).config))
                    steps = self._steps_for(len(rows.of_branch), len(rows.first), keys)
                    branches = steps.start(branches, segments, rows)
            assert steps
            steps.run(number)
        yield branches

    def _steps_for(self, num_branches: int, num_blocks: int, keys: KeyValues) -> RowSteps:
        """Passes for these branches and blocks of rows; those of an earlier wave if they serve."""
        for steps in self._steps:
            if steps.num_branches == capacity(num_branches) and num_blocks <= steps.num_blocks <= 2 * num_blocks + 32:
                return steps
        num_branches, num_blocks = capacity(num_branches), num_blocks + num_blocks // 4
        unused = Branches.unused(num_branches, PADDING, self.room.max_new_tokens, self.end_token_id, self.device)
        self._steps.append(RowSteps(self.model, keys.num_places, self.end_token_id, unused, num_blocks, self._capture))
        return self._steps[-1]

    def _buffer(self, num_places: int) -> KeyValues:
        """The buffer of a wave: one of its own, or the one of all waves, in whole blocks."""
        if not self._by_rows:
            return KeyValues(self.model, num_places, self.dtype)
        if self._keys is None or self._keys.num_places < num_places:
            self._steps.clear()
            num_places = -(-max(num_places, self.room.num_places + 1) // BLOCK) * BLOCK
            self._keys = KeyValues(self.model, num_places, self.dtype)
        return self._keys


def capacity(num_branches: int) -> int:
    """Branches that a captured pass has room for, so that passes of a few sizes serve all waves."""
    return -(-num_branches // BRANCHES) * BRANCHES
