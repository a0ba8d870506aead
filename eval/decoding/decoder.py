"""Answer questions: prompts in packs, then one token of every answer in each pass.

Which token attends to which is the rule of training (`train.model.attention.attends`), in packs by their indices and in
the buffer by slots. The positions of an answer continue from its prompt. So each answer has the tokens that `generate`
gives, apart from rounding. Answers that have ended leave the batch. On a GPU passes have a few sizes, each with tensors
of its own that serve all batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from lookonce.eval.decoding.batches import PADDING, BatchLayout, Branches, Room, Spans
from lookonce.eval.decoding.buffers import KeyValues
from lookonce.eval.decoding.dialogue import Answer, Sample
from lookonce.eval.decoding.passes import Prompts, Rows, RowSteps, add_token, inference, rows_of_block
from lookonce.eval.decoding.sampling import Chooser, Sampling, noise_of
from lookonce.train.data.batches import FeatureSource
from lookonce.train.data.packing import BLOCK
from lookonce.train.data.tokenize import ChatTokenizer, Example
from lookonce.train.model.attention import dense_mask
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import text_model
from lookonce.train.model.packs import cuda_graph_capture

STEPS_BETWEEN_CHECKS = 4
"""Passes on a GPU after which the CPU asks which answers have ended; each time the GPU has to wait."""
BRANCHES = 64
"""The numbers of branches in captured passes are multiples of this."""

Grown = tuple[list[int], list[list[float]]]
"""The tokens of an answer, and the log-probabilities of each."""


def capacity(num_branches: int) -> int:
    """Branches that a captured pass has room for, so that passes of a few sizes serve all batches."""
    return -(-num_branches // BRANCHES) * BRANCHES


class Decoder:
    """Answers of a model, which may have an adapter, to batches of questions: greedy ones, or samples."""

    def __init__(
        self,
        model: Any,
        chat: ChatTokenizer,
        source: FeatureSource,
        room: Room,
        dtype: torch.dtype,
        sampling: Sampling | None = None,
        *,
        by_rows: bool = False,
        compiled: bool = False,
    ) -> None:
        """Passes run under autocast to `dtype`, unless that is float32.

        `by_rows` chooses FlexAttention and `RowSteps`, which need a compiler on a GPU; otherwise masks
        are dense. `compiled` compiles the decoder layers, and on a GPU captures the passes by rows as CUDA graphs,
        but not those of models with linear attention. With `sampling` each question has `room.num_samples` answers.
        """
        self.model, self.chat, self.room, self.dtype = model, chat, room, dtype
        self.device: torch.device = model.device
        self.seed = 0
        """That of the samples of later batches."""
        self._compiled, self._by_rows = compiled, by_rows
        is_on_gpu = self.device.type == "cuda"
        captures = compiled and is_on_gpu and not linear_layers(text_model(model))
        self._chooser = Chooser(int(chat.tokenizer.eos_token_id), sampling, compiled=compiled and is_on_gpu)
        self._capture = cuda_graph_capture() if captures else None
        self._steps: list[RowSteps] = []
        self._prompts = Prompts(model, chat, source, room, flex=by_rows)
        self._keys: KeyValues | None = None

    def answers(self, batches: Iterable[Sequence[Example]]) -> Generator[list[Answer]]:
        """The answers to the questions of each batch, in order; their prompts are given. All samples of a question
        follow one another.

        Texts are decoded, and used by the caller, while the GPU computes the prompts of the next batch.
        """
        done: list[Grown] = []
        try:
            for layout, branches, keys in self.begun(batches):
                if done:
                    yield self._read(done)
                done = []
                done = self._grown(layout, branches, keys)
        except torch.OutOfMemoryError:
            if done:
                yield self._read(done)
            raise
        if done:
            yield self._read(done)

    def begun(self, batches: Iterable[Sequence[Example]]) -> Generator[tuple[BatchLayout, Branches, KeyValues]]:
        """Compute the prompts of each batch, which gives the first token of each answer."""
        with contextlib.closing(self._prompts.ahead(batches)) as ahead:
            for layout, packs in ahead:
                num_samples = self.room.num_samples
                keys = self._buffer(len(layout.until), PADDING + 1 + len(layout.examples))
                with self._passes(keys):
                    logits, positions = self._prompts.run(packs)
                    starts = layout.starts(self.device) | {"position": positions}
                    if self._chooser.samples:
                        noise = torch.from_numpy(noise_of(layout.prompts, num_samples, self.seed)).to(self.device)
                        starts["noise"] = noise[starts["examples"]]
                        starts["position"] = positions.repeat_interleave(num_samples)
                        logits = logits.repeat_interleave(num_samples, dim=0)
                    branches = Branches.answering(logits, self.room.max_new_tokens, self._chooser, **starts)
                yield layout, branches, keys

    def _grown(self, layout: BatchLayout, branches: Branches, keys: KeyValues) -> list[Grown]:
        """Let the answers of a batch grow from their first token to their end; in the order of its questions."""
        until, answers = torch.from_numpy(layout.until).to(self.device), dict[int, Grown]()
        with self._passes(keys):
            if self._by_rows:
                ended = [*self._in_rows(branches, layout.spans, until, keys)]
            else:
                ended = [*self._by_branch(branches, until)]
            for finished in ended:
                columns = (finished.examples.tolist(), finished.tokens.tolist(), finished.logprobs.tolist())
                answers |= {number: (tokens, logprobs) for number, tokens, logprobs in zip(*columns, strict=True)}
        return [answers[number] for number in range(len(answers))]

    def _by_branch(self, branches: Branches, until: torch.Tensor) -> Iterator[Branches]:
        """Let answers grow with dense masks; yields branches when they have ended and leave the batch."""
        for number in range(1, self.room.max_new_tokens):
            yield branches.subset(branches.ended)
            branches = branches.subset(~branches.ended)
            if not len(branches.ended):
                return
            mask = dense_mask(until, branches.slot)
            add_token(self.model, branches, torch.tensor([number], device=self.device), self._chooser, mask)
        yield branches

    def _in_rows(self, branches: Branches, spans: Spans, until: torch.Tensor, keys: KeyValues) -> Iterator[Branches]:
        """Let answers grow in passes of a few sizes; yields branches when they have ended and leave the batch."""
        steps = None
        for number in range(1, self.room.max_new_tokens):
            if number % STEPS_BETWEEN_CHECKS == 1:
                grows = ~branches.ended.cpu().numpy()
                if steps is None or 2 * capacity(grows.sum()) <= steps.num_branches:
                    chosen = torch.from_numpy(grows).to(until.device)
                    yield branches.subset(~chosen)
                    branches, spans = branches.subset(chosen), spans.subset(grows)
                    if not grows.any():
                        return
                    rows = Rows.of(spans, rows_of_block(text_model(self.model).config))
                    steps = self._steps_for(len(rows.of_token), len(rows.first), keys)
                    branches = steps.start(branches, until, rows)
            assert steps
            steps.run(number)
        yield branches

    def _steps_for(self, num_branches: int, num_blocks: int, keys: KeyValues) -> RowSteps:
        """Passes for these branches and blocks of rows; those of an earlier batch if they serve."""
        for steps in self._steps:
            if steps.num_branches == capacity(num_branches) and num_blocks <= steps.num_blocks <= 2 * num_blocks + 32:
                return steps
        num_branches, num_blocks = capacity(num_branches), num_blocks + num_blocks // 4
        unused = Branches.unused(num_branches, PADDING, self.room.max_new_tokens, self._chooser, self.model.device)
        steps = RowSteps(self.model, keys.num_slots, self._chooser, unused, num_blocks, self._capture)
        self._steps.append(steps)
        return steps

    def _read(self, done: Sequence[Grown]) -> list[Answer]:
        read = Sample.drawn if self._chooser.samples else Answer.of
        return [read(*grown, self.chat.tokenizer) for grown in done]

    def _passes(self, keys: KeyValues) -> AbstractContextManager[None]:
        return inference(self.model, self.dtype, keys, compiled=self._compiled)

    def _buffer(self, num_slots: int, num_states: int) -> KeyValues:
        """The buffers of a batch: some of its own, or those of all batches, in whole blocks."""
        if not self._by_rows:
            return KeyValues(self.model, num_slots, num_states, self.dtype)
        if self._keys is None or not self._keys.has_room(num_slots, num_states):
            self._steps.clear()  # their tensors are of no use for another buffer
            num_slots = -(-max(num_slots, self.room.num_slots + 1) // BLOCK) * BLOCK
            num_states = max(num_states, (self.room.num_states or 0) + 1)
            self._keys = KeyValues(self.model, num_slots, num_states, self.dtype)
        return self._keys
