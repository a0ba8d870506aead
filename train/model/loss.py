"""The loss of one micro-batch, of answers or of rewards, and the last decoder layer, for its targets alone.

Every target comes with its weight in the loss of the whole optimizer step (sampler.py). So a step's loss is the plain
sum over its micro-batches and ranks, however it was cut. Cross-entropy is computed in float32.

Of the last layer's results only those are used that targets are predicted from, a tenth of a pack's tokens. So keys and
values are computed for all tokens, and queries, attention, MLP and final norm for those tokens alone, which saves 2 %
of a step. transformers hands the tokens to all layers as an additional argument; here the last one gets a forward
method that takes it, made of the stock layer's own modules, in families whose description says how it computes. It is
not compiled with the other layers: a graph of its own would have to be compiled before each training.

Gathering is undone by a matrix product in the backward pass. Several targets may be predicted from one token, and
compiled code would add their gradients in an order that changes from run to run.

The loss of rewards (GRPO, https://arxiv.org/abs/2402.03300) is a sum over targets too, each with its advantage, the
log-probability with which it was drawn and, for the KL divergence, that of a reference. A target without weight may
have any values, also infinite ones, left from another pack in captured passes. So it is masked before the exponential,
whose product with 0 could be NaN otherwise.

Shapes: `B` rows (1 for a pack), `K` positions to predict from.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import cross_entropy, pad

from lookonce.families.lookup import family_of
from lookonce.train.data.batches import IGNORED, Batch
from lookonce.train.data.packing import padded_length
from lookonce.train.model.attention import Mask, PackMask, shared_prefix_attention
from lookonce.train.model.linear_attention import masks_of
from lookonce.train.model.load import is_sharded, replaced, text_model, without_ddp

Chosen = tuple[torch.Tensor, Mask]
"""Indices `[K]` of the tokens to predict from, and the mask of their attention."""
ADVANTAGES, OLD, REFERENCE, LOG_PROBS = REWARD_KEYS = (
    "advantages",
    "old_log_probs",
    "reference_log_probs",
    "log_probs",
)
"""Keys of a batch that learns from rewards, each `[1, K]`: how much better than the others an answer is; the
log-probability that a target had when it was drawn, and that of the reference, or NaN where they are the pass's own;
and the tensor into which its log-probability by this pass is written."""
LOSS_KEYS = ("targets", "weights", *REWARD_KEYS)
"""Keys of a batch that the loss takes, and not the model."""
MASK_KEY = "seen_until"
"""The key of a pack that its mask is made of."""


@contextlib.contextmanager
def short_last_layer(model: Any) -> Iterator[None]:
    """Let the last layer of a known model take `predict_from` within the block."""
    layer = text_model(model).layers[-1]
    is_left = is_short(layer) or not _is_known(model)
    with replaced([] if is_left else [(layer, "forward", MethodType(_forward, layer))]):
        yield


def inputs_of(model: Any, mask: PackMask, logits_to_keep: torch.Tensor, seen_until: torch.Tensor) -> dict[str, Any]:
    """Arguments with which a model computes logits at the indices `logits_to_keep` `[K]` of a pack, and as little else
    as it can. Call `mask` first."""
    inner = without_ddp(model)
    if not is_short(text_model(inner).layers[-1]):
        return {"logits_to_keep": logits_to_keep}
    num_chosen = len(logits_to_keep)
    num_rows = num_chosen if mask.is_dense else padded_length(num_chosen)
    indices = pad(logits_to_keep, (0, num_rows - num_chosen))
    return {"predict_from": (indices, mask.of_rows(indices, seen_until)), "logits_to_keep": slice(0, num_chosen)}


def is_short(layer: Any) -> bool:
    """Whether a layer takes `predict_from`."""
    return getattr(vars(layer).get("forward"), "__func__", None) is _forward


def _is_known(model: Any) -> bool:
    family, num_layers = family_of(model.config), len(text_model(model).layers)
    is_plain = family.has_short_last_layer and not text_model(model).config.attention_dropout
    num_added = family.num_levels(model.config.vision_config) - 1  # the layers to whose results features are added
    return is_plain and num_added < num_layers and not is_sharded(model)


def _forward(
    layer: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    predict_from: Chosen | None = None,
    **options: Any,
) -> torch.Tensor:
    """As the stock layer's forward method; with `predict_from`, for these tokens alone: `[1, K, H]`."""
    if predict_from is None:
        options["position_embeddings"] = position_embeddings
        return type(layer).forward(layer, hidden_states, *args, **options)  # type: ignore[no-any-return]
    indices, mask = predict_from
    rows: Any = _Rows
    normed, chosen = layer.input_layernorm(hidden_states), rows.apply(hidden_states, indices)
    chosen = chosen + _attend(layer.self_attn, rows.apply(normed, indices), normed, position_embeddings, indices, mask)
    result: torch.Tensor = chosen + layer.mlp(layer.post_attention_layernorm(chosen))
    return result


def _attend(
    attention: Any, queries: torch.Tensor, normed: torch.Tensor, rotary: Any, indices: torch.Tensor, mask: Mask
) -> torch.Tensor:
    """The stock attention of some tokens, `queries`, to all of them, `normed`."""
    query, key, value = (_heads(attention, *part) for part in (("q", queries), ("k", normed), ("v", normed)))
    rotate: Any = sys.modules[type(attention).__module__].apply_rotary_pos_emb
    query, _ = rotate(query, query, *(part[:, indices] for part in rotary))
    _, key = rotate(key, key, *rotary)
    attended, _ = shared_prefix_attention(attention, query, key, value, mask, scaling=attention.scaling)
    projected: torch.Tensor = attention.o_proj(attended.flatten(2))
    return projected


def _heads(attention: Any, part: str, x: torch.Tensor) -> torch.Tensor:
    """The queries, keys or values `[1, heads, L, size]`; some families normalise queries and keys."""
    heads = getattr(attention, f"{part}_proj")(x).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{part}_norm", None)
    return (norm(heads) if norm else heads).transpose(1, 2)  # type: ignore[no-any-return]


class _Rows(torch.autograd.Function):
    """`x[:, indices]`, whose gradients are added in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.length = x.shape[1]
        return x[:, indices]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (indices,) = ctx.saved_tensors
        is_row = torch.arange(ctx.length, device=indices.device)[:, None] == indices
        return (is_row.to(gradient.dtype) @ gradient[0])[None], None


def weighted_loss(logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of cross-entropies. `logits` `[B, K, vocabulary]`, `targets` and `weights` `[B, K]`."""
    if len(targets) > 1:  # a single row has a target in every column, and Boolean indexing forces a host-device sync
        chosen = targets != IGNORED
        logits, targets, weights = logits[chosen][None], targets[chosen][None], weights[chosen][None]
    each = cross_entropy(logits[0].float(), targets[0], reduction="none", ignore_index=IGNORED)
    return (each * weights[0]).sum()


@dataclass(frozen=True)
class RewardLoss:
    """The loss of GRPO: the clipped surrogate of PPO for each token, and the KL divergence to a reference (k3)."""

    clip: tuple[float, float] = (0.2, 0.28)
    """How far the ratio of probabilities may be below and above 1."""
    kl: float = 0.0
    """The weight of the KL divergence."""
    temperature: float = 1.0

    def __call__(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The weighted sum over the targets of a pack; writes their log-probabilities. `logits` `[1, K, vocabulary]`"""
        targets, weights, advantages = batch["targets"][0], batch["weights"][0], batch[ADVANTAGES][0]
        scaled = logits[0].float() if self.temperature == 1 else logits[0].float() / self.temperature
        log_probs = -cross_entropy(scaled, targets, reduction="none", ignore_index=IGNORED)
        own, old, counts = log_probs.detach(), batch[OLD][0], weights != 0
        batch[LOG_PROBS][0].copy_(own)
        advantages = advantages.where(counts, 0)
        ratio = (log_probs - own.where(old.isnan(), old)).where(counts & (advantages != 0), 0).exp()
        clipped = ratio.clamp(1 - self.clip[0], 1 + self.clip[1])
        each = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.kl:
            reference = batch[REFERENCE][0]
            above = (own.where(reference.isnan(), reference) - log_probs).where(counts, 0)
            each = each + self.kl * (above.exp() - above - 1)
        return (each * weights).sum()


def forward_loss(model: Any, batch: Batch, mask: PackMask | None, of_rewards: RewardLoss | None = None) -> torch.Tensor:
    """The share of a batch in the loss of its step, with gradients; rows need no `mask`, and packs with advantages
    `of_rewards`."""
    inputs: dict[str, Any] = {name: tensor for name, tensor in batch.items() if name not in (*LOSS_KEYS, MASK_KEY)}
    if mask is not None and MASK_KEY in batch:
        inputs["attention_mask"] = masks_of(model, mask(batch[MASK_KEY]), batch[MASK_KEY])
        inputs |= inputs_of(model, mask, batch["logits_to_keep"], batch[MASK_KEY])
    logits = model(**inputs, use_cache=False).logits
    if ADVANTAGES in batch:
        assert of_rewards, "packs with advantages need the loss of rewards"
        return of_rewards(logits, batch)
    return weighted_loss(logits, batch["targets"], batch["weights"])
