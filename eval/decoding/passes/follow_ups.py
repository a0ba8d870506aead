"""Passes over the prompts of later questions, which continue in the keys and values of what came before.

Design: what is computed of a later question is its own tokens; the image, the earlier questions and the model's answers
to them are in the buffer. Each token is a row of a pass, as in steps.py and row_steps.py, with the same masks, and
several rows have the same branch. On a GPU all passes have one size, so that they are compiled once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from lookonce.eval.decoding.answer import Answer
from lookonce.eval.decoding.branches import Branches, Queries
from lookonce.eval.decoding.dialogue import Dialogue
from lookonce.eval.decoding.layout import PADDING, Spans, state_rows
from lookonce.eval.decoding.passes.attention import rows_of_block
from lookonce.eval.decoding.passes.key_values import KeyValues
from lookonce.eval.decoding.passes.row_mask import RowMask, Rows
from lookonce.eval.decoding.passes.states import Continued
from lookonce.eval.decoding.passes.steps import dense_mask, forward
from lookonce.train.model.linear_attention import masks_with
from lookonce.train.model.load import text_model

TOKENS = 512
"""Tokens of a pass. The mask of more has more empty rows."""


@dataclass(frozen=True)
class FollowUp:
    """The tokens of a branch's next question that are not in the buffer."""

    token_ids: NDArray[np.int32]
    offset: int
    """Where they begin, counted from the first token of the answer before."""

    @classmethod
    def of(cls, dialogue: Dialogue, number: int, answer: Answer) -> FollowUp:
        """What follows the answer to question `number`, counted from 0."""
        shown, piece = dialogue.shown(answer), dialogue.later[number]
        if shown == answer.token_ids[:-1]:
            return cls(piece, len(shown))
        return cls(np.concatenate([np.array(shown, piece.dtype), piece]), 0)

    @property
    def end(self) -> int:
        """Where the answer begins, counted likewise."""
        return self.offset + len(self.token_ids)


class FollowUps:
    """Computes later questions with a model, whose attention writes keys and values to their places."""

    def __init__(self, model: Any, *, by_rows: bool) -> None:
        self._model, self._by_rows = model, by_rows
        self._mask: RowMask | None = None

    def run(
        self, begun: Branches, follow_ups: Sequence[FollowUp], spans: Spans, segments: torch.Tensor, keys: KeyValues
    ) -> torch.Tensor:
        """The logits of the first token of each answer `[N, vocabulary]`.

        `begun` has each branch at the first token of its last answer; `segments` are those of all places.
        """
        num_tokens = [len(one.token_ids) for one in follow_ups]
        branch = np.repeat(np.arange(len(follow_ups)), num_tokens)
        steps = np.concatenate([one.offset + np.arange(len(one.token_ids)) for one in follow_ups])
        device = segments.device
        ahead, of_token = torch.from_numpy(steps).to(device), torch.from_numpy(branch).to(device)
        queries = Queries(
            segment=begun.segment[of_token],
            prefix=begun.prefix[of_token],
            place=begun.place[of_token] + ahead,
            position=begun.position[of_token] + ahead,
            token=torch.from_numpy(np.concatenate([one.token_ids for one in follow_ups])).to(device).long(),
        )
        rows = state_rows(begun.examples)
        return torch.cat([*self._passes(queries, branch, rows, spans, segments, keys)])

    def _passes(
        self,
        queries: Queries,
        branch: NDArray[np.int64],
        rows: torch.Tensor,
        spans: Spans,
        segments: torch.Tensor,
        keys: KeyValues,
    ) -> Iterator[torch.Tensor]:
        """The logits of the last tokens, pass by pass; a pass may have none.

        `branch` has the branch of each token, and `rows` the row of each branch's state.
        """
        is_last = np.diff(branch, append=len(rows)) > 0
        for start in range(0, len(branch), TOKENS):
            chosen = slice(start, start + TOKENS)
            kept = torch.from_numpy(np.flatnonzero(is_last[chosen])).to(segments.device)
            some, of_some = queries.subset(chosen), branch[chosen]
            options: dict[str, Any] = {}
            mask: torch.Tensor | BlockMask
            if self._by_rows:
                some, mask, options = self._rows(some, spans.subset(of_some), segments, keys)
            else:
                mask = dense_mask(some, segments)
            masks = masks_with(self._model, mask, partial(Continued.by_tokens, of_some, rows, len(some.token)))
            yield forward(self._model, some, attention_mask=masks, logits_to_keep=kept, **options)

    def _rows(
        self, queries: Queries, spans: Spans, segments: torch.Tensor, keys: KeyValues
    ) -> tuple[Queries, BlockMask, dict[str, Any]]:
        """The tokens of a pass of `TOKENS` tokens, of which the last may be padding, its mask and its options."""
        if self._mask is None or self._mask.num_places != keys.num_places:
            rows_of = rows_of_block(text_model(self._model).config)
            self._mask = RowMask(TOKENS, TOKENS, rows_of, keys.num_places, segments.device)
        mask, padded = self._mask, queries.padded(TOKENS, PADDING)
        mask.set(queries, segments, Rows.of(spans, mask.rows_of_block))
        mask.set_places(padded.place)
        return padded, mask.blocks, {"rows": mask.rows}
