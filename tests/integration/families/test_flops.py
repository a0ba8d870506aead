"""FLOPs of the matrix products of a training step of each family, compared with PyTorch's own count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.trainings import batch_maker, batches, step
from torch.utils.flop_counter import FlopCounterMode

from lookonce.bench.step import KEYS_AND_VALUES, num_flops, num_pairs
from lookonce.train.model.load import base_model, head_size, load_without_tower, text_model

WITH_WEIGHTS = ("aten.mm", "aten.addmm")


@pytest.mark.guarantee("A benchmark counts the same FLOPs of matrix products as PyTorch, in each family.")
def test_products_with_weights_are_those_that_pytorch_counts(site, session, random_lora):
    """In some families the last layer computes more than targets need, which is counted beside."""
    model = random_lora(session, load_without_tower, torch.float32)
    base_model(model).set_experts_implementation("eager")  # a product for each expert
    base_model(model).enable_input_require_grads()  # so that the first layer computes gradients of its inputs too
    with FlopCounterMode(display=False) as counter:
        step(model, batches(session, "shared"))
    of_all = counter.get_flop_counts()["Global"]
    counted = sum(number for operation, number in of_all.items() if str(operation) in WITH_WEIGHTS)

    sampler = batch_maker(session, "shared").sampler
    groups = [group for [*micro_batches] in sampler.epoch(0) for one in micro_batches for group in one.pack.groups]
    config, layers = text_model(model).config, text_model(model).layers
    num_full = sum(hasattr(layer, "self_attn") for layer in layers)
    attention = 14 * (num_full - 1) * config.num_attention_heads * head_size(config) * sum(map(num_pairs, groups))
    targets = sum(int(sampler.examples[number].supervised.sum()) for group in groups for number in group.examples)
    others = sum(group.num_tokens for group in groups) - targets
    beside = 0 if site.family.has_short_last_layer else others * of_token(layers[-1], config)
    expected = num_flops(model, groups, sampler.examples) - attention + beside
    assert counted == pytest.approx(expected, rel=0.04)  # gathering adds some: its gradient is a product too


def of_token(layer: Any, config: Any) -> int:
    """FLOPs of a layer for a token that no target is predicted from, without its keys and values."""
    flops = 0
    for name, weight in layer.named_parameters():
        if weight.ndim >= 2 and not set(KEYS_AND_VALUES) & set(name.split(".")):
            share = config.num_experts_per_tok / config.num_experts if weight.ndim == 3 else 1
            flops += int(weight.numel() * share * (6 if weight.requires_grad else 4))
    return flops
