"""FLOPs of the language model's matrix products in training.

Counted are the products that cannot be left out; a multiplication and an addition are two FLOPs. A frozen weight is
used in the forward and in the backward pass (4 FLOPs a token), an adapter's weight also has a gradient (6), and
`lm_head` runs on targets only. Attention multiplies queries, keys and values for every pair of tokens of which one
attends to the other: two products in the forward and five in the backward pass (https://arxiv.org/abs/2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from lookonce.train.data.groups import Group
from lookonce.train.data.tokenize import Example
from lookonce.train.model.load import text_model


def num_flops(model: Any, groups: Iterable[Group], examples: Sequence[Example]) -> int:
    """FLOPs of one forward and backward pass over the prefixes and branches of `groups`."""
    text = text_model(model)
    config, weights = text.config, [weight for weight in text.layers.parameters() if weight.ndim == 2]
    adapter = sum(weight.numel() for weight in weights if weight.requires_grad)
    frozen = sum(weight.numel() for weight in weights) - adapter
    tokens = targets = pairs = 0
    for group in groups:
        tokens += group.num_tokens
        targets += sum(int(examples[number].supervised.sum()) for number in group.examples)
        pairs += num_pairs(group)
    head: int = config.hidden_size * config.vocab_size
    attention: int = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    total: int = (4 * frozen + 6 * adapter) * tokens + 4 * head * targets + 14 * attention * pairs
    return total


def num_pairs(group: Group) -> int:
    """Pairs of tokens of which one attends to the other; a token attends to itself."""
    prefix = group.num_prefix_tokens
    branches = zip_longest(group.branch_tokens, group.shared_tokens, fillvalue=0)
    return _triangle(prefix) + sum(_triangle(prefix + end) - _triangle(prefix + shared) for end, shared in branches)


def _triangle(number: int) -> int:
    return number * (number + 1) // 2
