"""Frozen weights: what `train.frozen` names and needs, and layers whose products are computed in fp8."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lookonce.errors import ModelError, UsageError
from lookonce.run.config import RunFile
from lookonce.run.sections import LoraSection
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.model.frozen import LARGEST, Fp8Linear, check_frozen, frozen_of_answers, model_settings, rounded
from lookonce.train.model.load import add_lora, load_without_tower

CPU = torch.device("cpu")


def layers(*, bias: bool = False) -> tuple[nn.Linear, Fp8Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(64, 48, bias=bias).requires_grad_(False)
    return plain, Fp8Linear(plain, CPU)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_values_keep_four_significant_bits_whatever_their_size(size):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * size
    values, scales = rounded(x)
    assert values.float().abs().amax(1).eq(LARGEST).all(), "the largest value of a row uses the whole range"
    assert ((values.float() * scales - x).abs() <= x.abs() / 16 + scales * 2**-10).all()


@pytest.mark.parametrize("bias", [False, True])
def test_results_and_gradients_are_near_those_of_the_layer_it_replaces(bias):
    plain, fp8 = layers(bias=bias)
    x = torch.randn(2, 5, 64, requires_grad=True)
    gradient = torch.randn(2, 5, 48)
    expected, found = plain(x), fp8(x)
    assert found.shape == expected.shape and found.dtype == x.dtype
    assert 0.005 < relative(found.detach(), expected.detach()) < 0.05
    [of_plain], [of_fp8] = (torch.autograd.grad(y, x, gradient) for y in (expected, found))
    assert 0.005 < relative(of_fp8, of_plain) < 0.05


@pytest.mark.guarantee("In fp8, a token's result and gradient do not depend on the tokens beside it.")
def test_a_token_is_computed_alike_whatever_is_beside_it():
    """As packs and padded rows put different tokens beside it."""
    _, fp8 = layers()
    x = torch.randn(1, 9, 64, requires_grad=True)
    large = torch.cat([x, 1e4 * torch.randn(1, 3, 64)], 1)
    alone, beside = fp8(x), fp8(large)[:, :9]
    assert torch.equal(alone, beside)
    gradient = torch.randn(1, 9, 48)
    assert torch.equal(*(torch.autograd.grad(y, x, gradient)[0] for y in (alone, beside)))


def test_peft_adds_an_adapter_in_float32_to_it():
    plain, fp8 = layers()
    model = get_peft_model(nn.Sequential(fp8, nn.LayerNorm(48)), LoraConfig(r=4, target_modules=["0"]))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert [weight.dtype for weight in trained.values()] == [torch.float32] * 2
    assert {tuple(weight.shape) for weight in trained.values()} == {(4, 64), (48, 4)}
    x = torch.randn(3, 64)
    assert torch.equal(model.base_model.model[0](x), fp8(x)), "a new adapter changes nothing"


def test_such_a_layer_is_no_module_to_save(sample_model):
    """PEFT would copy it as one to train, and nothing of it would be trained."""
    model = load_without_tower(sample_model, torch.float32, frozen="fp8")
    with pytest.raises(ModelError, match=r"^lora.modules_to_save: up_proj is quantised and cannot be trained"):
        add_lora(model, sample_model, LoraSection(modules_to_save=["up_proj"]), seed=0)


def test_a_gpu_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A100-SXM4-40GB")
    with pytest.raises(UsageError, match=r"^frozen: fp8 needs a GPU .*, and NVIDIA A100-SXM4-40GB cannot; set"):
        check_frozen("fp8")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    check_frozen("fp8")


@pytest.mark.parametrize(("trained", "expected"), [("fp8", "precision"), ("nf4", "nf4"), ("precision", "precision")])
def test_answers_are_computed_with_unrounded_weights_after_fp8(trained, expected):
    run: Any = SimpleNamespace(train=SimpleNamespace(frozen=trained))
    assert frozen_of_answers(run) == expected


def run_with(**train: str) -> RunFile:
    return RunFile.model_validate({"model": {"path": "m"}, "data": {"train": "a"}, "output": "b", "train": train})


@pytest.mark.parametrize("frozen", ["int8", "nf4"])
def test_a_missing_package_is_an_error_that_names_the_command(monkeypatch, frozen):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=rf"frozen: {frozen} needs bitsandbytes.*: pip install 'lookonce\[qlora\]'"):
        check_frozen(frozen)
    with pytest.raises(UsageError, match=rf"^train.frozen: {frozen} needs bitsandbytes"):
        training_arguments(run_with(frozen=frozen), Path("checkpoints"))


def test_answers_depend_on_quantised_weights_and_earlier_hashes_stay():
    assert model_settings(run_with()) == ["bf16", "sdpa"]
    assert model_settings(run_with(frozen="nf4")) == ["bf16", "sdpa", "nf4"]
