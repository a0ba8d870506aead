"""On a GPU, the kernels of joined matrices compute what PEFT computes, whatever the layout of their inputs."""

from __future__ import annotations

import pytest
import torch
from support.models.adapted import Layer, adapted, assert_close, computed
from support.trainings import COMPILED_ON_GPU
from torch import nn

from lookonce.train.model import compile
from lookonce.train.model.compile import fewer_passes

pytestmark = COMPILED_ON_GPU

NUM_TOKENS, WIDTH, OUT = 300, 200, 136


@pytest.fixture(autouse=True)
def the_model_is_its_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "text_model", lambda model: model)


@pytest.mark.guarantee(
    "LoRA in one matrix with frozen weights, and within an MLP, gives PEFT's results to rounding, in each family."
)
@pytest.mark.parametrize("rank", [1, 8, 20, 64])
@pytest.mark.parametrize("layout", ["rows", "columns", "expanded gradient"])
def test_outputs_and_gradients_are_those_of_peft(rank, layout):
    model = adapted(nn.Linear(WIDTH, OUT), r=rank, target_modules=["0"]).cuda()
    x = torch.randn(NUM_TOKENS, WIDTH).cuda()
    if layout == "columns":
        x = x.t().contiguous().t()
    gradient = torch.ones(1, 1, device="cuda").expand(NUM_TOKENS, OUT)
    if layout != "expanded gradient":
        gradient = torch.randn(OUT, NUM_TOKENS, device="cuda").t()
    expected = computed(model, model, x, gradient)
    with fewer_passes(model, joins=True):
        assert_close(computed(model, model, x, gradient), expected, 1e-5)


@pytest.mark.parametrize(
    ("rank", "num_tokens"), [(1, 300), (16, 1), (16, 300), (21, 300), (32, 1), (32, 300), (48, 300)]
)
def test_layers_that_share_a_matrix_and_mlps_compute_what_pefts_do(rank, num_tokens):
    model = adapted(Layer(WIDTH, OUT, 40, 328), Layer(WIDTH, 64, 64, 1024), r=rank).cuda()
    x = torch.randn(1, num_tokens, WIDTH).cuda()
    gradient = torch.randn(1, num_tokens, WIDTH).cuda()
    expected = computed(model, model, x, gradient)
    with fewer_passes(model, joins=True):
        assert_close(computed(model, model, x, gradient), expected, 1e-5)


def test_on_a_gpu_with_less_shared_memory_kernels_read_fewer_parts_ahead(monkeypatch):
    from lookonce.train.model import lora_kernels

    monkeypatch.setattr(lora_kernels, "_shared_memory", lambda device: 65_536)
    model = adapted(Layer(WIDTH, OUT, 40, 328), r=21).cuda()
    x = torch.randn(1, NUM_TOKENS, WIDTH).cuda()
    expected = computed(model, model, x)
    with fewer_passes(model, joins=True):
        assert_close(computed(model, model, x), expected, 1e-5)


def test_in_bfloat16_they_are_as_near_to_float32_as_pefts_are():
    layers = adapted(Layer(256, 256, 64, 768), Layer(256, 256, 64, 768), r=16).cuda()
    x, gradient = torch.randn(2, 1, 640, 256).cuda()
    expected = computed(layers, layers, x, gradient)
    for weight in layers.parameters():
        if not weight.requires_grad:
            weight.data = weight.data.to(torch.bfloat16)

    def in_bfloat16():
        with torch.autocast("cuda", torch.bfloat16):
            return computed(layers, layers, x.to(torch.bfloat16), gradient.to(torch.bfloat16))

    of_peft = in_bfloat16()
    with fewer_passes(layers, joins=True):
        found, again = in_bfloat16(), in_bfloat16()
    for ours, twice, theirs, exact in zip(found, again, of_peft, expected, strict=True):
        assert torch.equal(ours, twice)
        assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()
