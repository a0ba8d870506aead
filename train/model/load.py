"""Load the model without its vision tower, and add LoRA to its language model.

Design: `from_pretrained` builds models on the meta device. The tower is replaced right after the model's `__init__`, so
it never takes memory, and its tensors are skipped when the checkpoint is read. Every other tensor of the model must be
in the checkpoint, with its shape: a random one would be trained on without a word. LoRA is PEFT's. A LoRA pattern that
matches modules of the tower would match nothing here, but would add untrained adapters to the tower when the result is
loaded onto the stock model. So patterns are checked against the tower's module names first.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.environment import best_device, limit_cpu_threads
from lookonce.errors import ModelError, RunFolderError
from lookonce.run.config import RunFile
from lookonce.run.sections.lora import LoraSection
from lookonce.run.sections.train import UNQUANTISED
from lookonce.text import count, first_line, listed
from lookonce.train.model.cached_tower import CachedVisionTower
from lookonce.train.model.frozen.choice import frozen_of_answers, quantised

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The dtype of the frozen weights for each `train.precision` of a run file."""
TOWER_NAME = "model.visual"
NUM_NAMED = 4


def load_without_tower(
    model_folder: ModelFolder, dtype: torch.dtype, attention: str = "sdpa", frozen: str = UNQUANTISED
) -> Any:
    """The checkpoint's model with a `CachedVisionTower`: an instance of its stock class, frozen.

    It is on the CPU, or with quantised weights on the best device. `frozen` is a value of `train.frozen`.
    """
    stock_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(model_folder.config)]

    class WithoutTower(stock_class):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = [r"(^|\.)visual\."]

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            self.model.visual = CachedVisionTower(config.vision_config, dtype)

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
    weights = quantised(frozen)
    options = weights.loading_options(dtype) if weights else {}
    folder = model_folder.folder.absolute()  # PEFT records it in the adapter's configuration
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
    _check_filled(model_folder.folder, found)
    if weights:
        weights.finish(model)
        # transformers does not compare the shapes of what it quantises.
        _check_filled(model_folder.folder, found | {"mismatched_keys": [*weights.mismatched(model)]})
    return model.requires_grad_(False)


def _check_filled(folder: Path, found: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that leaves tensors of the model with random values, which transformers only logs."""
    shapes = [f"{name} {[*there]} instead of {[*wanted]}" for name, there, wanted in sorted(found["mismatched_keys"])]
    for problem, names in (("other shapes", shapes), ("no values", sorted(found["missing_keys"]))):
        if names:
            unknown = sorted(found["unexpected_keys"])
            others = f"; it has tensors that the model does not know: {listed(unknown, 2)}" if unknown else ""
            raise ModelError(
                f"{folder} has {problem} for {count(len(names), 'tensor')} of the model: {listed(names, NUM_NAMED)}"
                f"{others}; download the model again, or set `model.path` to a complete one"
            )


def add_lora(model: Any, model_folder: ModelFolder, options: LoraSection, seed: int) -> PeftModel:
    """Add a new adapter, determined by the seed. Trained weights are float32, whatever the model's dtype.

    Raises:
        ModelError: the targets match modules of the tower, or nothing.
    """
    config, in_tower = lora_config(options), _tower_module_names(model_folder)
    refuse_tower_targets(in_tower, config)
    _check_modules_to_save(model, options.modules_to_save)
    torch.manual_seed(seed)
    try:
        peft_model = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(f"lora.targets {options.targets}: {first_line(error)}") from None
    refuse_tower_targets(in_tower, peft_model.peft_config["default"])  # `all-linear` has been resolved to names
    _train_in_float32(peft_model)
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


def check_adapter(adapter: Path) -> None:
    """Check that there is a trained adapter in the folder.

    Raises:
        RunFolderError: there is none.
    """
    if not (adapter / "adapter_config.json").exists():
        raise RunFolderError(
            f"no trained adapter in {adapter}; finish the training with: lookonce train RUN.yaml --resume"
        )


def load_trained(model_folder: ModelFolder, run: RunFile, adapter: Path) -> PeftModel:
    """The model without its tower and with a trained adapter, on the best device, in evaluation mode.

    Raises:
        RunFolderError: there is no adapter in the folder.
    """
    check_adapter(adapter)
    model = _load_to_answer(model_folder, run)
    config = PeftConfig.from_pretrained(str(adapter))
    config.base_model_name_or_path = model.name_or_path  # which may have moved; the run folder compares its content
    config.inference_mode = False  # marks the trained weights, for `_train_in_float32`
    peft_model: Any = get_peft_model(model, config)
    _train_in_float32(peft_model)  # before the weights are loaded, as `PeftModel.from_pretrained` would round them
    load_weights(peft_model, adapter)
    trained: PeftModel = peft_model.requires_grad_(False).to(best_device()).eval()
    return trained


def load_weights(model: PeftModel, adapter: Path) -> None:
    """Give the model's adapter the weights of a trained one of the same shape."""
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


def base_model(model: Any) -> Any:
    """transformers' model, inside PEFT's if there is an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def lora_config(options: LoraSection) -> LoraConfig:
    """PEFT's configuration for the run file's `lora` section."""
    return LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        use_rslora=options.rslora,
        target_modules=options.targets,
        modules_to_save=options.modules_to_save or None,
        task_type="CAUSAL_LM",
    )


def refuse_tower_targets(names: list[str], config: Any) -> None:
    """Check that PEFT's `config` matches none of the tower's modules, neither as target nor as module to save.

    Raises:
        ModelError: it matches some; the message names them.
    """
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


def _tower_module_names(model_folder: ModelFolder) -> list[str]:
    with torch.device("meta"):
        tower_class: Any = MODEL_MAPPING[type(model_folder.vision_config)]
        tower = tower_class(model_folder.vision_config)
    return [f"{TOWER_NAME}.{name}" for name, _ in tower.named_modules() if name]
