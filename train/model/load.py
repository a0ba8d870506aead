"""Load the model without its vision tower, add LoRA to its language model, and shard its frozen weights over the ranks.

`from_pretrained` builds models on the meta device. The tower is replaced right after the model's `__init__`, so it
never takes memory, and its tensors are skipped when the checkpoint is read. Every other tensor of the model must be in
the checkpoint, with its shape: a random one would be trained on without a word.

The input of `CachedVisionTower` is features where the tower's is patches, and its output is the tower's. The rest of
the model is stock, so generate, PEFT and Trainer work unchanged.

Sharding (FSDP2) is for models that do not fit one GPU. The trained weights are small and stay whole on every rank; only
their gradients are exchanged. A decoder layer's frozen weights are gathered when it is needed and freed afterwards.
accelerate's FSDP2 would also shard the trained weights, sum their gradients in half precision, and does not run on CPUs
(`AcceleratorState`). The cost is that the whole model is communicated twice per micro-batch, which a pack of some
thousand tokens hides.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lookonce.cache.model.model_folder import ModelFolder, misshapen_expert_tensors, missing_expert_tensors
from lookonce.environment import best_device, limit_cpu_threads, one_cpu_thread
from lookonce.errors import ModelError, RunFolderError, UsageError
from lookonce.families.kernels import restrict_kernels
from lookonce.families.lookup import family_of
from lookonce.run.config import RunFile
from lookonce.run.folder import ADAPTER_FILES, AGAIN
from lookonce.run.sections import UNQUANTISED, LoraSection
from lookonce.run.startup import runs_several
from lookonce.text import count, first_line, listed, shown
from lookonce.train.model.frozen import (
    QUANTISED,
    check_frozen,
    finish,
    frozen_of_answers,
    loading_options,
    mismatched,
)
from lookonce.train.model.lora import (
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
_ABSENT = object()


class CachedVisionTower(nn.Module):
    """Returns cached features as a vision tower's output. It has no parameters."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        """`config` is the model's. The model casts features to `dtype` before it passes them here.

        Raises:
            UsageError: `config` has no vision tower.
        """
        super().__init__()
        if not hasattr(config, "vision_config"):
            raise UsageError(
                f"CachedVisionTower takes the configuration of the whole model, `model.config`, not "
                f"{type(config).__name__}; or let this do it: lookonce.replace_tower(model)"
            )
        family: Any = family_of(config)
        self.spatial_merge_size: int = config.vision_config.spatial_merge_size
        self.dtype = dtype
        self._with_deepstack = family.load("BaseModelOutputWithDeepstackFeatures") if family.has_deepstack else None

    def forward(
        self, hidden_states: torch.Tensor, grid_thw: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPooling:
        """`hidden_states` `[num_tokens, num_levels, hidden]` are the features of all images of the batch."""
        merged, *deepstack = hidden_states.unbind(dim=1)
        if self._with_deepstack is None:
            return BaseModelOutputWithPooling(pooler_output=merged)
        output: BaseModelOutputWithPooling = self._with_deepstack(pooler_output=merged, deepstack_features=deepstack)
        return output


def replace_tower(model: Any, dtype: torch.dtype) -> None:
    """Replace the tower by a `CachedVisionTower` in transformers' model."""
    setattr(model.model, family_of(model.config).tower, CachedVisionTower(model.config, dtype))


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


_kept: tuple[Any, Any] | None = None
"""In a process of several commands: what the model that was loaded last depends on, and that model, never trained."""


def _load(model_class: Any, model_folder: ModelFolder, dtype: torch.dtype, attention: str, frozen: str) -> Any:
    global _kept
    if not runs_several() or frozen in QUANTISED:
        return _load_files(model_class, model_folder, dtype, attention, frozen)
    check_frozen(frozen)
    limit_cpu_threads(model_folder.folder)
    files = sorted((path.name, path.stat()) for path in model_folder.folder.iterdir())
    stamps = [(name, status.st_size, status.st_mtime_ns, status.st_ino) for name, status in files]
    about = model_class.__name__, model_folder.folder.absolute(), stamps, dtype, attention
    if _kept is None or _kept[0] != about:
        _kept = None  # before there are two
        _kept = about, _load_files(model_class, model_folder, dtype, attention, UNQUANTISED)
    model = copied(_kept[1])
    finish(model, frozen)
    return model


def copied(model: Any) -> Any:
    """A copy of a frozen model, with modules and buffers of its own; the weights have the same memory."""
    weights: dict[int, Any] = {id(one): nn.Parameter(one.detach(), requires_grad=False) for one in model.parameters()}
    return copy.deepcopy(model, weights)


def _load_files(model_class: Any, model_folder: ModelFolder, dtype: torch.dtype, attention: str, frozen: str) -> Any:
    limit_cpu_threads(model_folder.folder)
    restrict_kernels(sys.modules[model_class.__module__])
    options = loading_options(frozen, dtype)
    folder = model_folder.folder.absolute()  # PEFT records it in the adapter's configuration
    shapes = model_folder.shapes()
    _check_filled(folder, missing_expert_tensors(model_folder, shapes))
    try:
        model, report = model_class.from_pretrained(
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
    missing, misshapen, unknown = (report[f"{kind}_keys"] for kind in ("missing", "mismatched", "unexpected"))
    _check_filled(folder, missing, misshapen, unknown)
    finish(model, frozen)
    _check_filled(folder, (), mismatched(model, frozen), unknown)  # transformers does not compare what it quantises
    return model.requires_grad_(False)


def _check_filled(
    folder: Path,
    missing: Iterable[str],
    mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]] = (),
    unknown: Iterable[str] = (),
) -> None:
    """Refuse a checkpoint that leaves tensors of the model with random values, which transformers only logs."""
    shapes = [f"{name} {[*stored]} instead of {[*needed]}" for name, stored, needed in sorted(mismatched)]
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
        with one_cpu_thread():
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


def _check_modules_to_save(model: Any, modules_to_save: list[str]) -> None:
    """Refuse names that match nothing, which PEFT ignores, and modules whose weights are rounded to whole numbers."""
    modules = {name: module for name, module in model.named_modules() if name}
    names = list(modules)
    for name in modules_to_save:
        matched = [found for found in names if found.endswith(name)]
        weights = {module: (*modules[module].parameters(), *modules[module].buffers()) for module in matched}
        if rounded := [one for one in matched if not all(map(torch.is_floating_point, weights[one]))]:
            raise ModelError(
                f"lora.modules_to_save: {name} is quantised and cannot be trained as a whole: "
                f"{listed(rounded, NUM_NAMED)}; name it in lora.targets, or set train.frozen: {UNQUANTISED}"
            )
        if not matched:
            near = difflib.get_close_matches(name, {module.rpartition(".")[2] for module in names}, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise ModelError(f"lora.modules_to_save: no module of the language model is named {name!r}{hint}")


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


@contextlib.contextmanager
def replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give objects attributes of their own within the block: each an object, a name and a value."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in attributes:
            before.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, outer in reversed(before):
            if outer is _ABSENT:
                delattr(owner, name)
            else:  # within another block
                setattr(owner, name, outer)


def text_model(model: Any) -> Any:
    """The language model of a model with or without an adapter."""
    return base_model(model).model.language_model


def head_size(config: Any) -> int:
    """The size of an attention head, for the configuration of a language model, which need not name it."""
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def base_model(model: Any) -> Any:
    """transformers' model, inside PEFT's if there is an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def without_ddp(model: Any) -> Any:
    """The model inside DistributedDataParallel, if it is in one."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def shard_frozen(model: Any, device: torch.device) -> Any:
    """Move the trained weights and this rank's shards of the frozen weights to `device`; returns the model.

    The model moves from the CPU layer by layer, so a GPU never holds all of it.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.data = weight.data.to(device)
    broadcast_trained(model)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for module in (*text_model(model).layers, model):
        fully_shard(module, mesh=mesh, ignored_params=set(trained))
    return model


def broadcast_trained(model: Any) -> None:
    """Copy the first rank's trained weights to all ranks."""
    for weight in model.parameters():
        if weight.requires_grad:
            distributed.broadcast(weight.data, src=0)


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)
