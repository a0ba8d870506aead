"""Load the model without its vision tower, and add LoRA to its language model.

Design: `from_pretrained` builds models on the meta device. The tower is replaced right after the model's `__init__`, so
it never takes memory, and its tensors are skipped when the checkpoint is read. Every other tensor of the model must be
in the checkpoint, with its shape: a random one would be trained on without a word. LoRA is PEFT's.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from lookonce.cache.model.model_folder import ModelFolder, misshapen_expert_tensors, missing_expert_tensors
from lookonce.environment import best_device, limit_cpu_threads
from lookonce.errors import ModelError, RunFolderError
from lookonce.families.kernels import restrict_kernels
from lookonce.run.config import RunFile
from lookonce.run.folder import ADAPTER_FILES, AGAIN
from lookonce.run.sections.lora import LoraSection
from lookonce.run.sections.train import UNQUANTISED
from lookonce.text import count, first_line, listed, shown
from lookonce.train.model.cached_tower import replace_tower
from lookonce.train.model.frozen.choice import frozen_of_answers, quantised
from lookonce.train.model.lora.targets import (
    expert_tensors,
    leave_experts_uncompiled,
    lora_config,
    of_language_model,
    refuse_tower_targets,
    tower_module_names,
)

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtype of the frozen weights for each `train.precision` of a run file."""
NUM_NAMED = 4


def load_without_tower(
    model_folder: ModelFolder, dtype: torch.dtype, attention: str = "sdpa", frozen: str = UNQUANTISED
) -> Any:
    """The checkpoint's model with a `CachedVisionTower`: an instance of its stock class, frozen.

    It is on the CPU, or with quantised weights on the best device. `frozen` is a value of `train.frozen`.
    """
    stock_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(model_folder.config)]

    class WithoutTower(stock_class):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = [
            *(stock_class._keys_to_ignore_on_load_unexpected or ()),
            rf"(^|\.){model_folder.family.tower}\.",
        ]

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            replace_tower(self, dtype)

    # transformers finds the names that a checkpoint has for tensors by the name and the module of the class
    WithoutTower.__name__, WithoutTower.__module__ = stock_class.__name__, stock_class.__module__
    model = _load(WithoutTower, model_folder, dtype, attention, frozen)
    model.__class__ = stock_class
    return model


def load_with_tower(
    model_folder: ModelFolder, dtype: torch.dtype, attention: str = "sdpa", frozen: str = UNQUANTISED
) -> Any:
    """The stock model with its tower, frozen, for comparisons."""
    stock_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(model_folder.config)]
    return _load(stock_class, model_folder, dtype, attention, frozen)


def _load(model_class: Any, model_folder: ModelFolder, dtype: torch.dtype, attention: str, frozen: str) -> Any:
    limit_cpu_threads(model_folder.folder)
    restrict_kernels(sys.modules[model_class.__module__])
    weights = quantised(frozen)
    options = weights.loading_options(dtype) if weights else {}
    folder = model_folder.folder.absolute()  # PEFT records it in the adapter's configuration
    shapes = model_folder.shapes()
    _check_filled(folder, missing_expert_tensors(model_folder, shapes))
    try:
        model, found = model_class.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except (ImportError, ValueError) as error:
        raise ModelError(
            f"cannot load {model_folder.folder} with model.attention: {attention} ({first_line(error)})"
        ) from None
    except RuntimeError:  # transformers could not join the tensors of experts, and does not name them
        _check_filled(folder, (), misshapen_expert_tensors(model_folder, shapes))
        raise
    missing, mismatched, unknown = (found[f"{kind}_keys"] for kind in ("missing", "mismatched", "unexpected"))
    _check_filled(folder, missing, mismatched, unknown)
    if weights:
        weights.finish(model)
        # transformers does not compare the shapes of what it quantises.
        _check_filled(folder, (), weights.mismatched(model), unknown)
    return model.requires_grad_(False)


def _check_filled(
    folder: Path,
    missing: Iterable[str],
    mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]] = (),
    unknown: Iterable[str] = (),
) -> None:
    """Refuse a checkpoint that leaves tensors of the model with random values, which transformers only logs."""
    shapes = [f"{name} {[*there]} instead of {[*wanted]}" for name, there, wanted in sorted(mismatched)]
    others = [*sorted(unknown)]
    for problem, names in (("other shapes", shapes), ("no values", sorted(missing))):
        if names:
            unused = f"; it has tensors that the model does not know: {listed(others, 2)}" if others else ""
            raise ModelError(
                f"{folder} has {problem} for {count(len(names), 'tensor')} of the model: {listed(names, NUM_NAMED)}"
                f"{unused}; download the model again, or set `model.path` to a complete one"
            )


def add_lora(model: Any, model_folder: ModelFolder, options: LoraSection, seed: int) -> PeftModel:
    """Add a new adapter, determined by the seed. Trained weights are float32, whatever the model's dtype.

    Raises:
        ModelError: the targets match modules of the tower, or nothing.
    """
    config, in_tower = lora_config(options), tower_module_names(model_folder)
    config.target_parameters = expert_tensors(options, model_folder.family)
    in_text = [name for name, _ in model.named_modules() if name not in in_tower]  # comparisons have the tower
    config.target_modules = of_language_model(config.target_modules, in_text, in_tower)
    refuse_tower_targets(in_tower, config)
    _check_modules_to_save(model, options.modules_to_save)
    torch.manual_seed(seed)
    try:
        peft_model = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"lora.targets {options.targets}: {first_line(error)}") from None
    adapter: Any = peft_model.peft_config["default"]  # `all-linear` has been resolved to names
    adapter.target_modules = of_language_model(adapter.target_modules, in_text, in_tower)
    refuse_tower_targets(in_tower, adapter)
    _train_in_float32(peft_model)
    leave_experts_uncompiled(peft_model)
    return peft_model


def _train_in_float32(model: PeftModel) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _check_modules_to_save(model: Any, wanted: list[str]) -> None:
    """Refuse names that match nothing, which PEFT ignores, and modules whose weights are rounded to whole numbers."""
    modules = {name: module for name, module in model.named_modules() if name}
    names = list(modules)
    for name in wanted:
        matched = [found for found in names if found.endswith(name)]
        if rounded := [one for one in matched if _is_quantised(modules[one])]:
            raise ModelError(
                f"lora.modules_to_save: {name} is quantised and cannot be trained as a whole: "
                f"{listed(rounded, NUM_NAMED)}; name it in lora.targets, or set train.frozen: {UNQUANTISED}"
            )
        if not matched:
            near = difflib.get_close_matches(name, {found.rpartition(".")[2] for found in names}, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise ModelError(f"lora.modules_to_save: no module of the language model is named {name!r}{hint}")


def _is_quantised(module: torch.nn.Module) -> bool:
    return not all(map(torch.is_floating_point, (*module.parameters(), *module.buffers())))


def load_trained(model_folder: ModelFolder, run: RunFile, adapter: Path) -> PeftModel:
    """The model without its tower and with a trained adapter, on the best device, in evaluation mode.

    Raises:
        RunFolderError: it is an adapter of another type, or a file of it is missing, which PEFT would ask the Hub for.
    """
    if absent := [name for name in ADAPTER_FILES if not (adapter / name).is_file()]:
        raise RunFolderError(f"{adapter} has no {absent[0]}; {AGAIN}")
    model = _load_to_answer(model_folder, run)
    config = PeftConfig.from_pretrained(str(adapter))
    if not isinstance(config, LoraConfig):
        raise RunFolderError(f"{adapter} holds an adapter of the type {shown(str(config.peft_type))}; expected LORA")
    config.megatron_config = None  # else PEFT would import whatever module the folder names
    config.base_model_name_or_path = model.name_or_path  # which may have moved; the run folder compares its content
    config.inference_mode = False  # marks the trained weights, for `_train_in_float32`
    peft_model: Any = get_peft_model(model, config)
    _train_in_float32(peft_model)  # before the weights are loaded, as `PeftModel.from_pretrained` would round them
    load_weights(peft_model, adapter)
    leave_experts_uncompiled(peft_model)
    trained: PeftModel = peft_model.requires_grad_(False).to(best_device()).eval()
    return trained


def load_weights(model: PeftModel, adapter: Path) -> None:
    """Give the model's adapter the weights of a trained one of the same shape.

    It has weights in safetensors, or PEFT would unpickle others.
    """
    set_peft_model_state_dict(model, load_peft_weights(str(adapter), device="cpu"))


def load_untuned(model_folder: ModelFolder, run: RunFile) -> Any:
    """The model without its tower and without an adapter, on the best device, in evaluation mode."""
    return _load_to_answer(model_folder, run).to(best_device()).eval()


def _load_to_answer(model_folder: ModelFolder, run: RunFile) -> Any:
    return load_without_tower(
        model_folder, PRECISIONS[run.train.precision], run.model.attention, frozen_of_answers(run)
    )


@contextlib.contextmanager
def without_adapter(model: PeftModel) -> Iterator[PeftModel]:
    """The model, whose adapter has no effect within the block."""
    with model.disable_adapter():
        yield model


def text_model(model: Any) -> Any:
    """The language model of a model with or without an adapter."""
    return base_model(model).model.language_model


def head_size(config: Any) -> int:
    """The size of an attention head, for the configuration of a language model, which need not name it."""
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def base_model(model: Any) -> Any:
    """transformers' model, inside PEFT's if there is an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
