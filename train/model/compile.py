"""The decoder layers while they train on packs: their attention, and compilation.

Design: transformers' layers as they are, each compiled alone (regional compilation), so that one graph serves them all
and compiling takes seconds. It serves packs of all lengths too, so none is compiled for in the middle of a training and
none is padded to fit a graph; that costs at most two percent of the time that a graph for one length takes. By default
PyTorch takes two sizes that happen to be equal for the same, and would compile for a first pack as long as the model is
wide alone; so its duck shapes are off. Past its limit of recompilations PyTorch would go on without compiling and has
been seen to give wrong results (https://github.com/unslothai/unsloth/pull/6871), so the limit is out of reach, and to
hit it is an error.

Layers that are sharded are compiled for the first length, and then for all. PyTorch takes the numbers that such a
module holds for inputs, and if sizes were open from the start it would leave open how large a head is, which
FlexAttention can not be compiled for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as fx_config

from lookonce.errors import ModelError
from lookonce.train.model.attention import NAME
from lookonce.train.model.fsdp import is_sharded
from lookonce.train.model.load import base_model, text_model
from lookonce.train.model.sync_free import without_waiting

FULL_ATTENTION = "full_attention"
"""transformers' name for layers that attend to whatever their mask allows."""
COMPILER: dict[str, Any] = {
    "recompile_limit": 128,
    "accumulated_recompile_limit": 4096,
    "fail_on_recompile_limit_hit": True,
    "optimize_ddp": False,  # would cut graphs to exchange gradients sooner; a layer a graph does that already
}


@contextlib.contextmanager
def training_on_packs(model: Any, *, compiled: bool) -> Iterator[None]:
    """Let a model train on packs: the attention of its decoder layers, compiled; undone at the end.

    Raises:
        ModelError: a layer attends in another way, which would mix the questions of a pack.
    """
    text = text_model(model)
    _check_layers(text.config)
    before = text.config._attn_implementation
    text.config._attn_implementation = NAME
    try:
        with _for_all_lengths(), without_waiting(base_model(model)):
            if compiled:
                for layer in text.layers:
                    layer.compile(dynamic=None if is_sharded(model) else True)
            yield
    finally:
        text.config._attn_implementation = before
        for layer in text.layers:
            layer._compiled_call_impl = None


@contextlib.contextmanager
def _for_all_lengths() -> Iterator[None]:
    with torch._dynamo.config.patch(COMPILER), fx_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


def _check_layers(config: Any) -> None:
    """A layer with a state that runs over its sequence, or with a window, knows nothing of who attends to whom."""
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {FULL_ATTENTION})
    if others:
        raise ModelError(
            f"{config.model_type} has layers of {', '.join(others)}, which can not keep the questions of a pack apart; "
            "set batch.mode: separate"
        )


def num_graphs() -> int:
    """How many graphs PyTorch has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])
