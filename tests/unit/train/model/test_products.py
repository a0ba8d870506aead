"""LoRA layers whose scale is in their matrix B compute what PEFT's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import adapted as adapters
from torch import nn

from lookonce.train.model import compile
from lookonce.train.model.compile import fewer_passes

INPUT = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


def computed(model: Any, *, bf16: bool = False) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of the adapter."""

    def call(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return model(x)

    return adapters.computed(call, model, INPUT)


def adapted(**options: Any) -> Any:
    return adapters.adapted(nn.Linear(8, 6), target_modules=["0"], **options)


@pytest.mark.guarantee(
    "LoRA with its scale in matrix B gives PEFT's results, to the last bit if the scale is a power of two, in "
    "each family."
)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_with_a_scale_that_is_a_power_of_two_no_bit_changes(bf16, dropout):
    model = adapted(lora_alpha=8, lora_dropout=dropout)
    expected = computed(model, bf16=bf16)
    with fewer_passes(model, joins=False):
        found = computed(model, bf16=bf16)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.guarantee(
    "LoRA with its scale in matrix B gives PEFT's results, to the last bit if the scale is a power of two, in "
    "each family."
)
def test_another_scale_changes_the_rounding_alone():
    model = adapted(lora_alpha=10, use_rslora=True, bias="lora_only")
    expected = computed(model)
    with fewer_passes(model, joins=False):
        found = computed(model)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
def test_what_peft_does_besides_is_left_to_it(options):
    model = adapted(lora_alpha=10, **options)
    with torch.no_grad():
        expected = model(INPUT)
        with fewer_passes(model, joins=False):
            assert torch.equal(model(INPUT), expected)
            with model.disable_adapter():
                without = model(INPUT)
            model.merge_adapter()
            merged = model(INPUT)
    torch.testing.assert_close(merged, expected)
    assert not torch.allclose(without, expected, atol=0.1)


def test_a_model_in_another_precision_without_autocast_is_left_to_peft():
    model = adapted(lora_alpha=8)
    model.base_model.model[0].base_layer.to(torch.bfloat16)
    x = INPUT.bfloat16()
    with torch.no_grad():
        expected = model(x)
        with fewer_passes(model, joins=False):
            found = model(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("joins", [False, True])
def test_it_is_undone_and_may_be_nested(monkeypatch, joins):
    monkeypatch.setattr(compile, "text_model", lambda model: model)
    model = adapted()
    layer = model.base_model.model[0]
    before, state = layer.base_layer.weight.clone(), set(model.state_dict())
    with fewer_passes(model, joins=joins):
        with fewer_passes(model, joins=joins):
            pass
        assert "forward" in vars(layer) and set(model.state_dict()) == state
    assert "forward" not in vars(layer) and not hasattr(layer, "joined") and not model._forward_pre_hooks
    assert torch.equal(layer.base_layer.weight, before) and layer.base_layer.weight.is_contiguous()
