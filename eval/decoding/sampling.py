"""Which token comes next: the likeliest, or one that is drawn from the model's distribution.

A sample takes the token with the largest sum of logit and Gumbel noise (Gumbel-max; Maddison et al. 2014, arXiv
1411.0030). The noise depends on the seed, the question (its images and the tokens of its prompt), the number of the
sample, the position in the answer and the token id alone. So a sample is the same whatever else is in its batch and
however it is computed, unless two sums are as near as the logits' rounding. An inverse distribution function would
carry the rounding of all tokens before. The same question asked twice has the same samples.

Noise is SplitMix64 of a counter (Steele et al. 2014, https://doi.org/10.1145/2660193.2660195): a few operations on
int64 tensors, so captured passes make it without the CPU. On a GPU it is compiled with the choice into one kernel,
since it would otherwise take as long as the pass.

With `top_p` the tokens are those of the smallest set with at least this probability, as in transformers, and all that
are as likely as the least of it, whatever the order of the sort.

Shapes: `N` answers, `V` the vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from lookonce.train.data.tokenize import Example

Chosen = tuple[torch.Tensor, torch.Tensor]
"""The token of each answer `[N]`, and its log-probabilities `[N, K]`."""
ROWS = 256
"""Answers whose noise is in memory together."""
ON_CPU = 1 << 18
"""The same on a CPU in numbers, which fit into its caches: a third of the time for a vocabulary of 151,936."""


@dataclass(frozen=True)
class Sampling:
    num_samples: int
    temperature: float = 1.0
    top_p: float = 1.0
    """The probability of the tokens that are drawn from."""
    max_new_tokens: int | None = None
    """Longest answer in tokens; by default that of the run."""


def likeliest(logits: torch.Tensor) -> Chosen:
    """The likeliest token by `logits` `[N, V]`, and its log-probability."""
    token = logits.argmax(dim=-1)
    logprob = logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(dim=-1)
    return token, logprob[:, None]


def drawn(
    logits: torch.Tensor,
    number: torch.Tensor,
    noise: torch.Tensor,
    counter: torch.Tensor,
    *,
    temperature: float,
    top_p: float,
) -> Chosen:
    """A token of each answer, drawn by `logits` `[N, V]` in float32.

    `number` `[1]` is that of the token in its answer, `noise` `[N]` as `noise_of` gives it, `counter` `[V]` that of
    `counter_of`. The log-probabilities are those of `Sample`, in its order.
    """
    scaled = logits / temperature
    kept = scaled.masked_fill(scaled < least_kept(scaled, top_p), -torch.inf) if top_p < 1 else scaled
    token = (kept + gumbel(noise, number, counter)).argmax(dim=-1)
    columns = [each.gather(1, token[:, None])[:, 0] - each.logsumexp(dim=-1) for each in (logits, scaled, kept)]
    return token, torch.stack(columns, dim=1)


def least_kept(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest logit of the likeliest tokens whose probability is at least `top_p`, `[N, 1]`."""
    descending = logits.sort(dim=-1, descending=True).values
    probabilities = descending.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return descending.gather(1, (before < top_p).sum(dim=-1, keepdim=True) - 1)


GAMMA = -0x61C8864680B583EB
FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""SplitMix64's constants as int64."""


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function; products are modulo 2 to the 64."""
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """The numbers shifted right without their sign."""
    return (numbers >> by) & ((1 << 64 - by) - 1)


def counter_of(size: int, device: torch.device) -> torch.Tensor:
    """SplitMix64's counter for `size` numbers.

    It must be made where nothing is compiled: PyTorch's compiler takes numbers that are counted up for indices, which
    may have fewer bits.
    """
    return GAMMA * torch.arange(1, size + 1, device=device)


def gumbel(noise: torch.Tensor, number: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """Gumbel noise `[N, V]` of token `number` `[1]` of each answer, by the `counter` `[V]` of the vocabulary."""
    rows = _mixed(noise + GAMMA * (number + 1))
    bits = _shifted(_mixed(rows[:, None] + counter), 11)
    # Small numbers, which give the largest noise, keep all digits of float32; neither end may be infinite.
    uniform = (bits.float() * 2.0**-53).clamp(2.0**-54, 1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def noise_of(questions: Sequence[Example], num_samples: int, seed: int) -> NDArray[np.int64]:
    """The number from which the noise of each sample is made: all samples of the first question, then of the next."""
    digests = []
    for question in questions:
        content = repr((question.token_ids.tobytes(), question.image_keys)).encode()
        of_question = hashlib.blake2b(content, digest_size=32, key=seed.to_bytes(8, "little")).digest()
        digests += [hashlib.blake2b(of_question + bytes(str(n), "ascii"), digest_size=8) for n in range(num_samples)]
    return np.frombuffer(bytearray().join(digest.digest() for digest in digests), np.int64)


class Chooser:
    def __init__(self, end_token_id: int, sampling: Sampling | None = None, *, compiled: bool = False) -> None:
        """`compiled` compiles how tokens are drawn."""
        self.end_token_id, self.samples, self.num_logprobs = end_token_id, sampling is not None, 3 if sampling else 1
        self._counter = torch.zeros(0, dtype=torch.int64)
        if sampling:
            draw = partial(drawn, temperature=sampling.temperature, top_p=sampling.top_p)
            self._draw: Callable[..., Chosen] = draw
            if compiled:
                self._draw = torch.compile(lambda *inputs: draw(*inputs), dynamic=True)

    def __call__(self, logits: torch.Tensor, number: torch.Tensor, noise: torch.Tensor) -> Chosen:
        """Token `number` `[1]` of each answer, by `logits` `[N, V]` in float32."""
        if not self.samples:
            return likeliest(logits)
        if self._counter.device != logits.device or len(self._counter) != logits.shape[1]:
            self._counter = counter_of(logits.shape[1], logits.device)
        num_rows = ROWS if logits.is_cuda else max(ON_CPU // logits.shape[1], 1)
        parts = (slice(start, start + num_rows) for start in range(0, len(noise), num_rows))
        chosen = (self._draw(logits[part], number, noise[part], self._counter) for part in parts)
        tokens, logprobs = zip(*chosen, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)
