"""One forward pass and its part of the step's loss.

Design: every target comes with its weight, which says what it counts in the whole optimizer step, so a step's loss is
the plain sum over its forward passes and ranks, however it was cut. Only the places to predict from go through the
language model's head, and cross-entropy is taken in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from lookonce.train.data.collate_rows import IGNORED
from lookonce.train.data.features import Batch
from lookonce.train.model.attention import PackMask

OF_LOSS = ("targets", "weights")
OF_MASK = ("run", "prefix")


def weighted_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of weighted cross-entropies: `logits` `[B, K, vocabulary]`, `targets` and `weights` `[B, K]`."""
    if len(targets) > 1:  # of a pack all are chosen, and to ask would make the CPU wait for the GPU
        chosen = targets != IGNORED
        logits, targets, weights = logits[chosen][None], targets[chosen][None], weights[chosen][None]
    each = cross_entropy(logits[0].float(), targets[0], reduction="none", ignore_index=IGNORED)
    return (each * weights[0]).sum()


def forward_loss(model: Any, batch: Batch, mask: PackMask) -> torch.Tensor:
    """The part that a batch has in the loss of its step; gradients flow."""
    inputs: dict[str, Any] = {name: tensor for name, tensor in batch.items() if name not in (*OF_LOSS, *OF_MASK)}
    if "run" in batch:
        inputs["attention_mask"] = mask(batch["run"], batch["prefix"])
    logits = model(**inputs, use_cache=False).logits
    return weighted_loss(logits, batch["targets"], batch["weights"])
