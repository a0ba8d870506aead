"""The frozen weights spread over the GPUs (FSDP2), for models that do not fit one of them.

Design: what is trained is small, so it stays whole on every rank and only its gradients are exchanged; what is frozen
is cut into as many parts as there are ranks. A decoder layer is put together when it is its turn and dropped
afterwards. Checkpoints, the optimizer and the adapter are those of any other training. accelerate's own FSDP2 would cut
up what is trained too, sum its gradients in half precision, and is not to be had on CPUs (`AcceleratorState`). The cost
is the traffic of the whole model twice a forward pass, which one pack of some thousand tokens hides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lookonce.train.model.load import text_model


def shard_frozen(model: Any, device: torch.device) -> Any:
    """Leave each rank its part of the frozen weights and all of what is trained, on `device`; gives the model.

    It comes from the CPU a layer at a time, so that it never is on a GPU as a whole.
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
    """Give all ranks the first one's weights of what is trained."""
    for weight in model.parameters():
        if weight.requires_grad:
            distributed.broadcast(weight.data, src=0)


def is_sharded(model: Any) -> bool:
    return isinstance(model, FSDPModule)


def average_gradients(model: Any) -> None:
    """Take the mean over ranks of what is trained; as one message."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    together = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(together)
    together /= distributed.get_world_size()
    parts = torch.split(together, [gradient.numel() for gradient in gradients])
    for gradient, averaged in zip(gradients, parts, strict=True):
        gradient.copy_(averaged.view_as(gradient))
