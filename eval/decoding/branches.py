"""The state of a wave's answers while they grow: a column of tensors, one entry for each branch.

Design: all columns stay on the device and are changed in place, and nothing is read back. So a pass can be captured as
a CUDA graph, and the CPU asks only now and then which answers have ended. A branch that has ended stays where it is:
passes overwrite its last token until it leaves the wave.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F

UNUSED = -1
"""The segment of a place that belongs to nothing, such as that of padding."""


def attends(segment_q: Any, prefix_q: Any, place_q: Any, segment_k: Any, place_k: Any) -> Any:
    """Whether a token at `place_q`, of a branch and its prefix, attends to the one at `place_k`.

    It is the rule of training for places that have room between them. Takes numbers or tensors.
    """
    return (place_k <= place_q) & ((segment_k == segment_q) | (segment_k == prefix_q))


@dataclass
class Queries:
    """Tokens that a pass computes; `N` of them."""

    segment: torch.Tensor
    prefix: torch.Tensor
    """Each one's segment, and the segment that is its prefix, `[N]`."""
    place: torch.Tensor
    """The place where the pass writes its keys and values, `[N]`."""
    position: torch.Tensor
    """Its position, on all three axes, `[N]`."""
    token: torch.Tensor
    """The token, `[N]`."""

    def subset(self, chosen: torch.Tensor | slice) -> Self:
        """Some of them, by their indices or by a mask `[N]`; those of a slice share their tensors with these."""
        return type(self)(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    def padded(self, length: int, place: int) -> Queries:
        """These and tokens that belong to nothing, `length` altogether; `place` is one for padding."""
        unused = {"segment": UNUSED, "prefix": UNUSED, "place": place, "position": 0, "token": 0}
        missing = length - len(self.token)
        return Queries(
            **{name: F.pad(getattr(self, name), (0, missing), value=value) for name, value in unused.items()}
        )


@dataclass
class Branches(Queries):
    """Branches that are being answered; `N` of them. The next pass computes the latest token of each."""

    examples: torch.Tensor
    """The number of each one's question, `[N]`."""
    ended: torch.Tensor
    """Whether the latest token is the end token, `[N]`."""
    tokens: torch.Tensor
    """The answers so far, filled up with the end token, `[N, max_new_tokens]`."""
    logprobs: torch.Tensor
    """The log-probability of each token, and 0 behind the end token, `[N, max_new_tokens]`."""

    @classmethod
    def unused(cls, number: int, place: int, max_new_tokens: int, end_token_id: int, device: torch.device) -> Branches:
        """Branches that belong to no question, and have ended; `place` is one for padding, where they write."""

        def column(value: int) -> torch.Tensor:
            return torch.full((number,), value, device=device)

        return cls(
            segment=column(UNUSED),
            prefix=column(UNUSED),
            place=column(place),
            position=column(0),
            token=column(end_token_id),
            examples=column(UNUSED),
            ended=torch.ones(number, dtype=torch.bool, device=device),
            tokens=torch.full((number, max_new_tokens), end_token_id, device=device),
            logprobs=torch.zeros(number, max_new_tokens, device=device),
        )

    @classmethod
    def answering(
        cls, logits: torch.Tensor, max_new_tokens: int, end_token_id: int, **columns: torch.Tensor
    ) -> Branches:
        """Branches with the first token of each answer, the likeliest by `logits` `[N, vocabulary]`."""
        device, number = logits.device, len(logits)
        unused = cls.unused(number, UNUSED, max_new_tokens, end_token_id, device)
        branches = replace(unused, ended=torch.zeros(number, dtype=torch.bool, device=device), **columns)
        branches.add(torch.tensor([0], device=device), logits, end_token_id)
        return branches

    def add(self, number: torch.Tensor, logits: torch.Tensor, end_token_id: int) -> None:
        """Take the likeliest token of each branch as token `number` `[1]` of its answer. `logits` `[N, vocabulary]`."""
        logits = logits.float()
        token = logits.argmax(dim=-1)
        logprob = logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(dim=-1)
        self.token.copy_(torch.where(self.ended, end_token_id, token))
        self.tokens.index_copy_(1, number, self.token[:, None])
        self.logprobs.index_copy_(1, number, torch.where(self.ended, 0.0, logprob)[:, None])
        self.ended |= token == end_token_id

    def advance(self) -> None:
        """Move on to the place and the position of the token that is added next."""
        self.place += ~self.ended
        self.position += ~self.ended

    def load(self, others: Branches) -> None:
        """Overwrite the first branches with others, in the same tensors."""
        for field in fields(self):
            column = getattr(others, field.name)
            getattr(self, field.name)[: len(column)].copy_(column)
