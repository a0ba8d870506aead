"""Joined matrices of frozen weights and LoRA compute what PEFT computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lookonce.train.model.lora import products
from lookonce.train.model.lora.products import fewer_passes

INPUT = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def the_model_is_its_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "text_model", lambda model: model)


def adapted(**options: Any) -> Any:
    """Two layers with adapters that do something."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 9, bias=False))
    model = get_peft_model(layers, LoraConfig(**{"target_modules": ["0", "2"], "r": 4, "lora_alpha": 10} | options))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return model


def computed(model: Any) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of the adapters."""
    model.zero_grad()
    x = INPUT.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *(weight.grad.clone() for weight in model.parameters() if weight.requires_grad)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("rank", [1, 4, 64])
def test_outputs_and_gradients_are_those_of_peft(rank):
    model = adapted(r=rank)
    expected = computed(model)
    with fewer_passes(model, joins=True):
        assert all(hasattr(model.base_model.model[number], "joined") for number in (0, 2))
        assert_close(computed(model), expected)


def test_changed_lora_weights_are_used_in_the_next_pass():
    model = adapted()
    with fewer_passes(model, joins=True):
        before = computed(model)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight += 0.1
        found = computed(model)
    assert not torch.allclose(found[0], before[0])
    assert_close(found, computed(model))


@pytest.mark.parametrize(
    "options", [{"r": 65}, {"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True, "target_modules": ["0"]}]
)
def test_what_cannot_be_joined_is_computed_as_before(options):
    model = adapted(**options).eval()
    expected = computed(model)
    with fewer_passes(model, joins=True):
        assert_close(computed(model), expected)
        with model.disable_adapter(), torch.no_grad():
            assert torch.equal(model(INPUT), model.base_model.model(INPUT))


def test_an_adapter_in_another_precision_is_not_joined():
    model = adapted().to(torch.bfloat16)
    with fewer_passes(model, joins=True):
        assert not hasattr(model.base_model.model[0], "joined")
