"""Joined matrices of frozen weights and LoRA in compiled layers."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lookonce.train.model.lora import products
from lookonce.train.model.lora.products import fewer_passes


def test_one_compiled_graph_computes_what_peft_computes(monkeypatch):
    monkeypatch.setattr(products, "text_model", lambda model: model)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 9, bias=False))
    model = get_peft_model(layers, LoraConfig(r=4, lora_alpha=10, target_modules=["0", "2"]))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        nn.init.normal_(weight)
    x = torch.randn(3, 5, 8, requires_grad=True)

    def computed(call):
        output = call(x)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *trained])]

    expected = computed(model)
    with fewer_passes(model, joins=True):
        model(x)  # copies LoRA's matrices
        found = computed(torch.compile(model.base_model.model, dynamic=True, backend="aot_eager", fullgraph=True))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()
