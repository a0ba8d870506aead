"""LoRA targets mean the language model alone, also where the tower's modules have the same names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from pydantic import ValidationError
from torch import nn

from lookonce.errors import ModelError
from lookonce.families.lookup import FAMILIES
from lookonce.run.sections import LoraSection
from lookonce.train.model.lora import (
    beyond_targets,
    expert_tensors,
    lora_config,
    of_language_model,
    refuse_tower_targets,
)

TEXT = [
    *(f"model.language_model.layers.{number}.{name}" for number in range(2) for name in ("attn.q_proj", "mlp.up_proj")),
    "lm_head",
]
TOWER = ["model.visual.blocks.0.mlp.up_proj", "model.visual.blocks.0.attn.qkv"]


def matched(targets: object) -> list[str]:
    """The modules of the stock model that PEFT gives LoRA weights to."""
    config = SimpleNamespace(target_modules=targets, exclude_modules=None, layers_to_transform=None)
    return [name for name in TEXT + TOWER if check_target_module_exists(config, name)]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj"], TEXT[:4:2]),
        (["up_proj"], TEXT[1::2]),
        (["q_proj", "up_proj"], TEXT[:4]),
        ({"q_proj", "up_proj"}, TEXT[:4]),
        (["mlp.up_proj"], TEXT[1::2]),
        (["up_proj", "lm_head"], [TEXT[1], *TEXT[3:]]),
        (r".*layers\.1\..*up_proj", TEXT[3:4]),
    ],
)
def test_names_match_modules_of_the_language_model_alone(targets, expected):
    found = of_language_model(targets, TEXT, TOWER)
    assert matched(found) == expected
    refuse_tower_targets(TOWER, SimpleNamespace(target_modules=found, exclude_modules=None, modules_to_save=None))


@pytest.mark.parametrize("targets", [["up_proj", "qkv"], ["qkv"], r".*up_proj"])
def test_what_only_the_tower_has_is_refused(targets):
    config = lora_config(LoraSection(targets=targets))
    config.target_modules = of_language_model(config.target_modules, TEXT, TOWER)
    with pytest.raises(ModelError, match="lora.targets reaches into the vision tower"):
        refuse_tower_targets(TOWER, config)


def test_experts_are_named_by_their_family_or_refused():
    moe = FAMILIES["qwen3_vl_moe"]
    assert expert_tensors(LoraSection(experts=True), moe) == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert expert_tensors(LoraSection(), moe) is None
    with pytest.raises(ModelError, match="lora.experts: Qwen2.5-VL has no experts; leave the key out"):
        expert_tensors(LoraSection(experts=True), FAMILIES["qwen2_5_vl"])
    with pytest.raises(ValidationError, match=r"experts: true needs dropout: 0, not 0\.1; set one of them"):
        LoraSection(experts=True, dropout=0.1)


class Experts(nn.Module):
    """The matrices of three experts in one, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.zeros(3, 4, 2))


class Adapted(nn.Module):
    """A linear layer with LoRA weights, as PEFT names its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(4, 2).requires_grad_(False), nn.Linear(4, 2)


def test_matrices_without_lora_weights_are_said_with_their_share():
    experts, router = Experts().requires_grad_(False), nn.Linear(4, 3).requires_grad_(False)
    parts = {"proj": Adapted(), "norm": nn.LayerNorm(4)}

    def said(**more: nn.Module) -> str | None:
        return beyond_targets(nn.ModuleList([nn.ModuleDict(parts | more)] * 2))

    assert said() is None
    share = 24 / (24 + 8)
    assert said(experts=experts) == f"no LoRA weights for experts.down_proj: {share:.0%} of the decoder layers' weights"
    share = 12 / (12 + 8)
    assert said(router=router) == (
        f"no LoRA weights for router: {share:.0%} of the decoder layers' weights; lora.targets: all-linear "
        "includes all linear layers"
    )
