"""FLOPs of the language model's matrix products in training, and the FLOP/s that a device reaches in large products.

Design: counted are the products that cannot be left out; a multiplication and an addition are two FLOPs. A frozen
weight is used in the forward and in the backward pass (4 FLOPs a token), an adapter's weight also has a gradient (6).
`lm_head` and what follows the keys and values of the last layer run on targets only. Attention multiplies queries, keys
and values for every pair of tokens of which one attends to the other: two products in the forward and five in the
backward pass (https://arxiv.org/abs/2205.14135); that of the last layer is not counted. Of layers of linear attention
only the products with weights are counted: their state is no product of all pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch.nn import Linear

from lookonce.train.data.packing import Group
from lookonce.train.data.tokenize import Example
from lookonce.train.model.linear_attention import linear_layers
from lookonce.train.model.load import head_size, text_model

KEYS_AND_VALUES = ("k_proj", "v_proj")
"""The products of the last layer that all its tokens need."""


def num_flops(model: Any, groups: Iterable[Group], examples: Sequence[Example]) -> int:
    """FLOPs of one forward and backward pass over the prefixes and branches of `groups`."""
    config, layers = text_model(model).config, text_model(model).layers
    of_target: int = 4 * config.hidden_size * config.vocab_size
    of_token = 0
    for name, module in layers.named_modules():
        if flops := _of_token(module, config):
            number, *parts = name.split(".")
            if number == str(len(layers) - 1) and not set(KEYS_AND_VALUES) & set(parts):
                of_target += flops
            else:
                of_token += flops
    tokens = targets = pairs = 0
    for group in groups:
        tokens += group.num_tokens
        targets += sum(int(examples[number].supervised.sum()) for number in group.examples)
        pairs += num_pairs(group)
    num_layers = len(layers) - len(linear_layers(text_model(model)))
    of_pair: int = 14 * (num_layers - 1) * config.num_attention_heads * head_size(config)
    return of_token * tokens + of_target * targets + of_pair * pairs


def _of_token(module: Any, config: Any) -> int:
    """FLOPs of a layer for one token, 0 for what is no product. A token goes through a few of the experts only."""
    if isinstance(module, Linear):
        return int(module.in_features * module.out_features * (6 if module.weight.requires_grad else 4))
    num_experts = getattr(config, "num_experts", 0)
    weights = [weight for weight in module.parameters(recurse=False) if weight.ndim == 3 and len(weight) == num_experts]
    return 4 * sum(map(torch.numel, weights)) // num_experts * int(config.num_experts_per_tok) if weights else 0


def num_pairs(group: Group) -> int:
    """Pairs of tokens of which one attends to the other; a token attends to itself."""
    prefix = group.num_prefix_tokens
    branches = zip_longest(group.branch_tokens, group.shared_tokens, fillvalue=0)
    return _triangle(prefix) + sum(_triangle(prefix + end) - _triangle(prefix + shared) for end, shared in branches)


def _triangle(number: int) -> int:
    return number * (number + 1) // 2


SIZE = 8192
"""Rows and columns of the matrices on a GPU; an eighth of it on a CPU."""
NUM_PRODUCTS = 30


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """The median over some products of random matrices, each timed alone, so that the first ones do not count."""
    size = SIZE if device.type == "cuda" else SIZE // 8
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(NUM_PRODUCTS):
        synchronize(device)
        start = time.perf_counter()
        left @ right
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, so that a clock shows when its work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
