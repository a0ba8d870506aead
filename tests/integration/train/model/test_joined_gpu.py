"""On a GPU, the kernels of joined matrices compute what PEFT computes, whatever the layout of their inputs."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.trainings import COMPILED_ON_GPU
from torch import nn

from lookonce.train.model.lora import products
from lookonce.train.model.lora.products import fewer_passes

pytestmark = COMPILED_ON_GPU

NUM_TOKENS, WIDTH, OUT = 300, 200, 136


@pytest.mark.parametrize("rank", [1, 8, 20, 64])
@pytest.mark.parametrize("layout", ["rows", "columns", "expanded gradient"])
def test_outputs_and_gradients_are_those_of_peft(monkeypatch, rank, layout):
    monkeypatch.setattr(products, "text_model", lambda model: model)
    torch.manual_seed(0)
    options = LoraConfig(r=rank, lora_alpha=10, target_modules=["0"])
    model = get_peft_model(nn.Sequential(nn.Linear(WIDTH, OUT)), options).cuda()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        nn.init.normal_(weight)
    x = (
        torch.randn(WIDTH, NUM_TOKENS, device="cuda").T
        if layout == "columns"
        else torch.randn(NUM_TOKENS, WIDTH).cuda()
    )
    gradient = torch.ones(1, 1, device="cuda").expand(NUM_TOKENS, OUT)
    if layout != "expanded gradient":
        gradient = torch.randn(OUT, NUM_TOKENS, device="cuda").T

    def computed():
        wanted = x.requires_grad_()
        output = model(wanted)
        return [output.detach(), *torch.autograd.grad(output, [wanted, *trained], gradient)]

    expected = computed()
    with fewer_passes(model, joins=True):
        found = computed()
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
