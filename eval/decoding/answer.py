"""One answer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Ended = Literal["stop", "length"]


@dataclass(frozen=True)
class Answer:
    """A greedy answer to one question."""

    text: str
    token_ids: tuple[int, ...]
    """The generated tokens, with the end token if there is one."""
    logprob: float
    """The sum of the tokens' log-probabilities."""
    ended: Ended
    """`stop` at an end token, `length` at the largest number of new tokens."""

    @classmethod
    def of(cls, token_ids: Sequence[int], logprobs: Sequence[float], tokenizer: Any) -> Answer:
        """The answer of some tokens and their log-probabilities; what follows an end token is left out."""
        ended = tokenizer.eos_token_id in token_ids
        length = [*token_ids].index(tokenizer.eos_token_id) + 1 if ended else len(token_ids)
        text = tokenizer.decode(token_ids[:length], skip_special_tokens=True)
        return cls(text, tuple(token_ids[:length]), sum(logprobs[:length]), "stop" if ended else "length")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
