"""Questions of a conversation that are answered one after another, their answers, and how these stand in later prompts.

Only tokens are put together. What the chat template writes between an answer and the next one begins with the end
token, so its tokens do not depend on the answer, which keeps the tokens that the model gave. An answer that is empty,
was cut off, or has special tokens, which could begin a message or stand for an image, is replaced by a text.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import ModelError

if TYPE_CHECKING:
    from lookonce.train.data.tokenize import ChatTokenizer, Example


Ended = Literal["stop", "length"]


@dataclass(frozen=True)
class Answer:
    """A greedy answer to one question, or a sample."""

    text: str
    token_ids: tuple[int, ...]
    """The generated tokens, with the end token if there is one."""
    logprob: float
    """The sum of the tokens' log-probabilities."""
    ended: Ended
    """`stop` at an end token, `length` at the largest number of new tokens."""

    @classmethod
    def of(cls, token_ids: Sequence[int], logprobs: Sequence[Sequence[float]], tokenizer: Any) -> Answer:
        """The answer of some tokens, each with its log-probability; what follows an end token is left out."""
        ended = tokenizer.eos_token_id in token_ids
        length = [*token_ids].index(tokenizer.eos_token_id) + 1 if ended else len(token_ids)
        text = tokenizer.decode(token_ids[:length], skip_special_tokens=True)
        logprob = sum(of_token[0] for of_token in logprobs[:length])
        return Answer(text, tuple(token_ids[:length]), logprob, "stop" if ended else "length")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Sample(Answer):
    """An answer that was drawn, with three log-probabilities of each of its tokens.

    They are equal at a temperature of 1 and a `top_p` of 1.
    """

    logprobs: tuple[float, ...]
    """By the model's own distribution: at a temperature of 1 and without `top_p`. `logprob` is their sum."""
    tempered: tuple[float, ...]
    """At the temperature of sampling, without `top_p`: the policy of GRPO, whose ratios have these (as in TRL)."""
    sampled: tuple[float, ...]
    """By the distribution that it was drawn from: at this temperature, over the tokens that `top_p` keeps."""

    @classmethod
    def drawn(cls, token_ids: Sequence[int], logprobs: Sequence[Sequence[float]], tokenizer: Any) -> Sample:
        """The sample of some tokens, each with its three log-probabilities in the order of the fields."""
        answer = cls.of(token_ids, logprobs, tokenizer)
        values = (getattr(answer, field.name) for field in fields(Answer))
        return cls(*values, *zip(*logprobs[: answer.num_tokens], strict=True))


Pieces = NDArray[np.int32]


@dataclass(frozen=True)
class Dialogue:
    """One or several questions; each prompt has the model's answers to the questions before."""

    first: Example
    """The prompt of the first question, which may have earlier turns."""
    later: tuple[Pieces, ...] = ()
    """For each later question, the tokens from the end of the answer before it to the beginning of its own."""
    not_answered: tuple[int, ...] = ()
    """The tokens of `NOT_ANSWERED`."""
    special: frozenset[int] = frozenset()
    """Token ids that no shown answer has."""

    @classmethod
    def of(cls, prompts: Sequence[Example], chat: ChatTokenizer) -> Dialogue:
        """The dialogue of some prompts, in which each earlier turn is answered by `NOT_ANSWERED`.

        Raises:
            ModelError: the chat template changes earlier turns as others follow.
        """
        if len(prompts) == 1:
            return cls(prompts[0])
        end = int(chat.tokenizer.eos_token_id)
        later: list[Pieces] = []
        shown: tuple[int, ...] = ()
        for before, after in pairwise(prompts):
            begun, tail = np.split(after.token_ids, [len(before.token_ids)])
            ends = np.flatnonzero(tail == end)
            if not np.array_equal(begun, before.token_ids) or not len(ends):
                raise ModelError(
                    f"{after.origin}: the chat template changes earlier turns when others follow, so a conversation "
                    "cannot continue from predicted answers; set `eval.turns: reference`"
                )
            shown, later = tuple(tail[: ends[0]].tolist()), [*later, tail[ends[0] :]]
        return cls(prompts[0], tuple(later), shown, frozenset(chat.special_token_ids))

    @property
    def num_questions(self) -> int:
        return 1 + len(self.later)

    def room(self, max_new_tokens: int) -> int:
        """Slots behind the first prompt for the answers and the later questions."""
        shown = max(max_new_tokens, len(self.not_answered))
        return max_new_tokens + sum(shown + len(piece) for piece in self.later)

    def prompt(self, answers: Sequence[Answer]) -> Example:
        """The prompt of the question after some answers."""
        tokens = [self.first.token_ids]
        for answer, piece in zip(answers, self.later, strict=False):
            shown = answer.token_ids[:-1] if is_shown(answer, self.special) else self.not_answered
            tokens += [np.array(shown, np.int32), piece]
        token_ids = np.concatenate(tokens)
        return replace(self.first, token_ids=token_ids, supervised=np.zeros(len(token_ids), np.bool_))


def is_shown(answer: Answer, special: Set[int]) -> bool:
    """Whether later prompts have an answer; `special` has the token ids that none may have."""
    return answer.ended == "stop" and bool(answer.text.strip()) and special.isdisjoint(answer.token_ids[:-1])
