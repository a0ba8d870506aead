"""Models of scripts of one's own, with an adapter that has an effect, the same each time."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*\.(q_proj|v_proj)")
TOLERANCE = 1e-5
Gradients = dict[str, torch.Tensor]


def filled(model: Any) -> Any:
    """The model with other values of its adapter: at first it has no effect."""
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def tuned_model(model: Any) -> Any:
    return filled(get_peft_model(model, LORA))


def gradients_of(model: Any) -> Gradients:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.requires_grad}


def assert_same(found: Gradients, wanted: Gradients) -> None:
    assert found.keys() == wanted.keys() and found
    for name, gradient in found.items():
        assert (gradient - wanted[name]).norm() <= TOLERANCE * wanted[name].norm(), name
