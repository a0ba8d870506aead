"""The state of a wave's answers while they grow: a column of tensors, one entry for each branch.

Design: all columns stay on the device. A step changes them in place and reads nothing back, so that the CPU can be
ahead, and asks only now and then which answers have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

UNUSED = -1
"""The segment of a place that belongs to nothing, such as that of padding."""


@dataclass
class Branches:
    """Branches that are being answered; `N` of them."""

    examples: torch.Tensor
    """The number of each one's question, `[N]`."""
    segment: torch.Tensor
    prefix: torch.Tensor
    """Each one's segment, and the segment that is its prefix, `[N]`."""
    place: torch.Tensor
    """The place of the next token, `[N]`."""
    position: torch.Tensor
    """The position of the next token, on all three axes, `[N]`."""
    tokens: torch.Tensor
    """The answers so far `[N, max_new_tokens]`, filled up with the end token."""
    logprobs: torch.Tensor
    """The log-probability of each token `[N, max_new_tokens]`, and 0 behind the end token."""
    ended: torch.Tensor
    """Whether the end token was given, `[N]`."""

    def add(self, number: int, logits: torch.Tensor, end_token_id: int) -> None:
        """Take the likeliest token of each branch as number `number` of its answer. `logits` `[N, vocabulary]`."""
        logits = logits.float()
        token = logits.argmax(dim=-1)
        logprob = logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(dim=-1)
        self.tokens[:, number] = torch.where(self.ended, end_token_id, token)
        self.logprobs[:, number] = torch.where(self.ended, 0.0, logprob)
        self.ended |= token == end_token_id

    def subset(self, chosen: torch.Tensor) -> Branches:
        """The branches at some indices, `[M]`."""
        return Branches(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})
