"""Which modules get LoRA weights, those of the language model that the run file names; and LoRA layers with a scaled B.

The tower is not in memory, so a pattern that matches its modules would match nothing here, but would add untrained
adapters to the tower when the result is loaded onto the stock model. So a pattern that matches names of the tower's
modules is refused, and names that both parts have become a pattern of the language model.

PEFT casts the input of each layer to float32 and multiplies LoRA's output, which is as large as the layer's, by the
scale alpha / rank. In `scaled_forward` the scale multiplies B, and autocast casts the two matrices; the result is the
same, to the last bit if the scale is a power of two. What PEFT does besides (several adapters, DoRA, merged weights,
quantised layers) is left to it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import check_target_module_exists
from torch.nn.functional import linear

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.errors import ModelError
from lookonce.families.family import Family
from lookonce.families.lookup import FAMILIES
from lookonce.run.sections import LoraSection
from lookonce.text import listed

NUM_NAMED = 4
EXPERTS = {name for family in FAMILIES.values() for name in family.experts}
"""The tensors of experts that `lora.experts` gives LoRA weights, as they are named in a decoder layer."""


def lora_config(options: LoraSection) -> LoraConfig:
    """PEFT's configuration for the run file's `lora` section."""
    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        use_rslora=options.rslora,
        lora_dropout=options.dropout,
        target_modules=options.targets,
        modules_to_save=options.modules_to_save or None,
        task_type="CAUSAL_LM",
    )


def expert_tensors(options: LoraSection, family: Family) -> list[str] | None:
    """The tensors of experts that get LoRA weights, if the run file asks; raises ModelError if the family has none."""
    if options.experts and not family.experts:
        raise ModelError(f"lora.experts: {family.name} has no experts; leave the key out")
    return [*family.experts] if options.experts else None


def leave_experts_uncompiled(model: PeftModel) -> None:
    """Let compiled layers call PEFT's code for experts, which replaces their tensors as it runs, as it is."""
    disable: Any = torch.compiler.disable
    for wrapper in _wrappers(model):
        wrapper.forward = disable(wrapper.forward)


def _wrappers(model: torch.nn.Module) -> list[Any]:
    """PEFT's modules around those whose tensors have LoRA weights."""
    return [module for module in model.modules() if isinstance(module, ParamWrapper)]


def of_language_model(targets: Any, in_text: list[str], in_tower: list[str]) -> Any:
    """LoRA targets that match modules of the language model alone, if they are names that the tower's modules have too.

    The tower is not here, but the adapter is also loaded onto models that have it.
    """
    if isinstance(targets, str) or not any(_is_named(targets, in_tower)):
        return targets
    is_in_both = all(any(_is_named([target], in_text)) for target in targets)
    return rf"(.*\.language_model\..*\.)?({'|'.join(map(re.escape, sorted(targets)))})" if is_in_both else targets


def _is_named(targets: Iterable[str], modules: list[str]) -> Iterator[bool]:
    suffixes = tuple(f".{target}" for target in targets)
    return (f".{module}".endswith(suffixes) for module in modules)


def refuse_tower_targets(names: list[str], config: Any) -> None:
    """Check that PEFT's `config` matches no module of the tower, as target or to save; raises ModelError."""
    try:
        matched = [name for name in names if check_target_module_exists(config, name)]
    except re.error as error:
        raise ModelError(f"lora.targets {config.target_modules!r} is not a regular expression: {error}") from None
    saved = [name for name in names if name.endswith(tuple(config.modules_to_save or ()))]  # as PEFT matches them
    for option, found in (("targets", matched), ("modules_to_save", saved)):
        if found:
            raise ModelError(
                f"lora.{option} reaches into the vision tower, which is frozen and not in memory: it matches "
                f"{listed(found, NUM_NAMED)}; name modules of the language model, for example q_proj, k_proj, v_proj, "
                "o_proj, gate_proj, up_proj, down_proj"
            )


def tower_module_names(model_folder: ModelFolder) -> list[str]:
    """The names that the tower's modules have in the stock model."""
    with torch.device("meta"):
        family = model_folder.family
        tower = family.load(family.tower_class)(model_folder.vision_config)
    return [f"model.{family.tower}.{name}" for name, _ in tower.named_modules() if name]


def beyond_targets(layers: torch.nn.ModuleList) -> str | None:
    """What to say of the matrices of decoder layers that get no LoRA weights; None if all get some."""
    total, linear, others = 0, Counter[str](), Counter[str]()
    adapted = {id(wrapper.get_param()) for wrapper in _wrappers(layers)}
    for name, module in layers.named_modules():
        for own, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2 or weight.requires_grad:
                continue
            total += weight.numel()
            in_layer = name.partition(".")[2]
            if isinstance(module, torch.nn.Linear):
                linear[in_layer] += 0 if in_layer.endswith(".base_layer") else weight.numel()
            elif id(weight) not in adapted:
                others[f"{in_layer}.{own}"] += weight.numel()
    left_out = +(linear + others)
    if not left_out:
        return None
    share = left_out.total() / total
    names = listed(sorted(left_out), NUM_NAMED)
    hint = "; lora.targets: all-linear includes all linear layers" if linear.total() else ""
    hint += "; lora.experts: true includes the experts" if left_out.keys() & EXPERTS else ""
    return f"no LoRA weights for {names}: {share:.0%} of the decoder layers' weights{hint}"


def scaled_forward(layer: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """As PEFT's forward method."""
    if not is_plain(layer, x) or args or options:
        return type(layer).forward(layer, x, *args, **options)  # type: ignore[no-any-return]
    (name,) = layer.active_adapters
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight * layer.scaling[name]
    result: torch.Tensor = layer.base_layer(x)
    return result + linear(linear(layer.lora_dropout[name](x), a), b)


def is_plain(layer: Any, x: torch.Tensor) -> bool:
    """Whether a layer has one LoRA adapter and nothing else, in a precision that needs no cast of the input."""
    names = layer.active_adapters
    if len(names) != 1 or names[0] not in layer.lora_A or layer.disable_adapters or layer.merged or layer.lora_variant:
        return False
    needs_cast = layer.lora_A[names[0]].weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type)
    return layer.lora_B[names[0]].bias is None and not needs_cast
