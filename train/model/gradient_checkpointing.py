"""Gradient checkpointing: activations that the backward pass computes again instead of storing them.

Design: PyTorch's checkpoint is inside of a compiled layer, where the compiler only notes what not to store. So a layer
stays one graph, its passes can be captured as CUDA graphs, and dropout is the same in both passes, since its seed is
stored. The same operations are computed again, so loss and gradients do not change; those that no gradient needs are
left out, such as a layer's last product. `train.gradient_checkpointing: true` is for whole layers. `selective` is for
MLPs, which have half of a layer's products and most of its activations; attention is stored.

With dropout a compiled layer that is checkpointed as a whole draws other random numbers than one that is not: the
compiler numbers the draws of each graph by itself. The gradients are those of its own loss.

Layers that are not compiled keep and set random states, so their passes cannot be captured. With FSDP, the hooks that
gather and free a layer's weights are outside of its forward method, as they must be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import checkpoint

from lookonce.run.sections.train import Checkpointing
from lookonce.train.model.load import text_model


class InputsAreStored(CustomGraphPass):
    """Unmarks inputs of a graph that torch 2.11 would compute again, which fails: the sizes of random tensors."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="placeholder"):
            node.meta.pop("recompute", None)

    def uuid(self) -> str:
        return type(self).__qualname__


@contextlib.contextmanager
def checkpointed(model: Any, how: Checkpointing) -> Iterator[None]:
    """Compute activations of the decoder layers again in the backward pass within the block.

    Those of the last layer are stored, as its backward pass comes first.
    """
    layers = text_model(model).layers[:-1] if how else []
    parts = [layer.mlp if how == "selective" else layer for layer in layers]
    before = [vars(part).get("forward") for part in parts]
    for part in parts:
        part.stored_forward, part.forward = part.forward, MethodType(_forward, part)
    try:
        with inductor_config.patch(joint_custom_post_pass=InputsAreStored() if how else None):
            yield
    finally:
        for part, forward in zip(parts, before, strict=True):
            del part.stored_forward, part.forward
            if forward:
                part.forward = forward


def _forward(part: Any, *args: Any, **options: Any) -> Any:
    """A module's forward method, checkpointed."""
    forward = partial(part.stored_forward, **options)
    return checkpoint(forward, *args, use_reentrant=False) if torch.is_grad_enabled() else forward(*args)
