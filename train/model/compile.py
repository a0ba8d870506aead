"""Set up the decoder layers for training on packs: their attention, and torch.compile.

Design: transformers' layers are used unchanged and compiled one by one (regional compilation), so that one graph serves
all layers and compiling takes seconds. For that the first layer's input gets a gradient like those of all others, which
costs some products of one layer; without it that layer would need a graph of its own. The graph also serves packs of
all lengths (dynamic shapes), so no recompilation happens during training and no pack is padded to a graph's length.
This costs at most two percent of the time of a graph for one length. By default PyTorch assumes that two sizes that
happen to be equal are always equal ("duck shapes"), and would compile a special graph if the first pack is as long as
the model is wide; so duck shapes are off. Beyond its recompilation limit PyTorch would continue uncompiled, and has
been seen to give wrong results (https://github.com/unslothai/unsloth/pull/6871). So the limit is set out of reach, and
reaching it is an error.

Sharded layers (FSDP2) are compiled for the first length, and then for all lengths. PyTorch treats the integer
attributes of such a module as inputs. With dynamic shapes from the start, the size of an attention head would be
dynamic too, and FlexAttention cannot be compiled for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._functorch import config as autograd_config
from torch.fx.experimental import _config as fx_config

from lookonce.errors import ModelError
from lookonce.families.family import Family
from lookonce.families.lookup import family_of
from lookonce.train.model.attention import NAME
from lookonce.train.model.fsdp import is_sharded
from lookonce.train.model.last_layer import is_short, short_last_layer
from lookonce.train.model.linear_attention import states_of_branches
from lookonce.train.model.load import base_model, text_model
from lookonce.train.model.lora.products import fewer_passes
from lookonce.train.model.sync_free import without_syncs

COMPILER: dict[str, Any] = {
    "recompile_limit": 128,
    "accumulated_recompile_limit": 4096,
    "fail_on_recompile_limit_hit": True,
    "specialize_float": True,  # or the LoRA scale and each epsilon are inputs on the CPU, with C++ kernels to compile
    "optimize_ddp": False,  # would split graphs to exchange gradients earlier; one graph per layer does that already
}
AUTOGRAD: dict[str, Any] = {
    "ban_recompute_materialized_backward": False,  # or the results of norms and SwiGLU are stored for products
}
"""Settings that let the backward pass compute cheap results again: a quarter less memory in the same time."""


@contextlib.contextmanager
def training_on_packs(model: Any, *, compiled: bool, attention: str = NAME) -> Iterator[None]:
    """Set a model up for training on packs, with `compiled` decoder layers; undone on exit.

    `attention` is transformers' name of the attention of packs.

    Raises:
        ModelError: a layer does not use full attention, so it would mix the questions of a pack.
    """
    check_layers(family_of(model.config), text_model(model).config)
    trains = attention == NAME and torch.is_grad_enabled()  # else the last layer would be compiled for nothing
    last_layer = short_last_layer(model) if trains else contextlib.nullcontext()
    with (
        as_loaded(model, attention),
        for_all_lengths(),
        without_syncs(base_model(model)),
        fewer_passes(model, joins=_joins(model)),
        states_of_branches(model, compiled=compiled),
        last_layer,
        _inputs_with_gradient(text_model(model)) if compiled else contextlib.nullcontext(),
    ):
        for layer in _alike(text_model(model).layers) if compiled else ():
            layer.compile(dynamic=None if is_sharded(model) else True)
        yield


@contextlib.contextmanager
def _inputs_with_gradient(text: Any) -> Iterator[None]:
    """Let embeddings have a gradient where other layers' inputs have one, though nothing is trained below them."""

    def require_gradient(text: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        embeddings = options.get("inputs_embeds")
        if torch.is_grad_enabled() and embeddings is not None and not embeddings.requires_grad:
            options["inputs_embeds"] = embeddings.detach().requires_grad_()
        return args, options

    hook = text.register_forward_pre_hook(require_gradient, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _alike(layers: Any) -> list[Any]:
    """The layers that share a graph. The short last one would need another, and is a small part of a step."""
    return [layer for layer in layers if not is_short(layer)]


def _joins(model: Any) -> bool:
    """Whether LoRA's matrices are joined with frozen weights: on a GPU with Triton, and if these are not sharded."""
    on_gpu = next(model.parameters()).is_cuda and find_spec("triton") is not None
    return on_gpu and torch.is_grad_enabled() and not is_sharded(model)


@contextlib.contextmanager
def as_loaded(model: Any, attention: str) -> Iterator[None]:
    """Use an attention and layers that are not compiled within the block, whatever they are outside of it."""
    text = text_model(model)
    before = text.config._attn_implementation, [layer._compiled_call_impl for layer in text.layers]
    text.config._attn_implementation = attention
    for layer in text.layers:
        layer._compiled_call_impl = None
    try:
        yield
    finally:
        text.config._attn_implementation = before[0]
        for layer, compiled in zip(text.layers, before[1], strict=True):
            layer._compiled_call_impl = compiled


@contextlib.contextmanager
def other_attention(model: Any, attention: str) -> Iterator[None]:
    """Use another attention within `training_on_packs`, with layers that are compiled once for all lengths."""
    layers = text_model(model).layers
    compiles = any(layer._compiled_call_impl for layer in layers)
    with as_loaded(model, attention):
        for layer in layers if compiles else ():
            layer._compiled_call_impl = _compiled_apart(layer)
        yield


def _compiled_apart(layer: Any) -> Callable[..., Any]:
    """The compiled layer, with code of its own, because passes of two attentions cannot share a graph."""

    def call(*args: Any, **options: Any) -> Any:
        return layer._call_impl(*args, **options)

    return torch.compile(call, dynamic=True)


@contextlib.contextmanager
def for_all_lengths() -> Iterator[None]:
    """Compile one graph for all lengths within the block."""
    with (
        torch._dynamo.config.patch(COMPILER),
        fx_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        autograd_config.patch(AUTOGRAD),
    ):
        yield


def check_layers(family: Family, config: Any) -> None:
    """Refuse layers with a recurrent state or a sliding window, which a pack's mask does not restrict.

    `config` is the language model's.
    """
    others = sorted(set(getattr(config, "layer_types", None) or ()) - family.layer_types)
    if others:
        raise ModelError(
            f"{family.name} has layers of {', '.join(others)}, which cannot keep the questions of a pack apart; "
            "set batch.mode: separate and eval.engine: generate"
        )


def num_compiled_graphs() -> int:
    """The number of graphs that torch.compile has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])
