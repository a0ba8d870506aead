"""The frozen weights sharded over the ranks (FSDP2), for models that do not fit one GPU.

Design: the trained weights are small, so they stay whole on every rank and only their gradients are exchanged. The
frozen weights are sharded: a decoder layer is gathered when it is needed and freed afterwards. Checkpoints, optimizer
and adapter are the same as without sharding. accelerate's FSDP2 would also shard the trained weights, sum their
gradients in half precision, and does not run on CPUs (`AcceleratorState`). The cost is that the whole model is
communicated twice per micro-batch, which a pack of some thousand tokens hides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lookonce.train.model.load import text_model


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


def average_gradients(model: Any) -> None:
    """Replace the gradients of trained weights by their means over all ranks, in one message."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(together)
    together /= distributed.get_world_size()
    averages = torch.split(together, [gradient.numel() for gradient in gradients])
    for gradient, averaged in zip(gradients, averages, strict=True):
        gradient.copy_(averaged.view_as(gradient))
