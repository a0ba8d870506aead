"""The loss of one micro-batch, as its share of the step's loss.

Design: every target comes with its weight in the loss of the whole optimizer step (sampler.py). So a step's loss is the
plain sum over its micro-batches and ranks, however it was cut. Only the positions to predict from go through the
language model's head, and cross-entropy is computed in float32.

Shapes: `B` rows (1 for a pack), `K` positions to predict from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy

from lookonce.train.data.batches import IGNORED, Batch
from lookonce.train.model.attention import PackMask
from lookonce.train.model.last_layer import inputs_of
from lookonce.train.model.linear_attention import masks_of

LOSS_KEYS = ("targets", "weights")
"""Keys of a batch that the loss takes, and not the model."""
MASK_KEY = "seen_until"
"""The key of a pack that its mask is made of."""


def weighted_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of cross-entropies. `logits` `[B, K, vocabulary]`, `targets` and `weights` `[B, K]`."""
    if len(targets) > 1:  # a single row has a target in every column, and Boolean indexing forces a host-device sync
        chosen = targets != IGNORED
        logits, targets, weights = logits[chosen][None], targets[chosen][None], weights[chosen][None]
    each = cross_entropy(logits[0].float(), targets[0], reduction="none", ignore_index=IGNORED)
    return (each * weights[0]).sum()


def forward_loss(model: Any, batch: Batch, mask: PackMask) -> torch.Tensor:
    """A batch's share of the loss of its step, with gradients."""
    inputs: dict[str, Any] = {name: tensor for name, tensor in batch.items() if name not in (*LOSS_KEYS, MASK_KEY)}
    if MASK_KEY in batch:
        inputs["attention_mask"] = masks_of(model, mask(batch[MASK_KEY]), batch[MASK_KEY])
        inputs |= inputs_of(model, mask, batch["logits_to_keep"], batch[MASK_KEY])
    logits = model(**inputs, use_cache=False).logits
    return weighted_loss(logits, batch["targets"], batch["weights"])
