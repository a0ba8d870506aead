"""The stock model's passes over a pack, without making the CPU wait for the GPU.

Design: to index by a boolean mask, to compare counts and to take a tensor's numbers each empties the GPU's queue, and
while the CPU fills it again the GPU is idle. transformers' model does so about ten times a forward pass: where it looks
for image tokens, where it cuts features into images, and in each DeepStack level. The same values are had without: what
would be compared is known from making the pack, and features are added as a tensor that is zero elsewhere. Two methods
of the stock model are replaced while this lasts; a test holds that they exist and that nothing changes in any bit. The
cost is a sum over the whole pack for each DeepStack level, a tenth of a millisecond.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def without_waiting(model: Any) -> Iterator[None]:
    """Let a model that gets packs add images to its text without asking the GPU; `model` wears no adapter."""
    inner, text = model.model, model.model.language_model
    image_token_id: int = inner.config.image_token_id

    def placeholders(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return (input_ids == image_token_id)[..., None], None

    replaced = ((inner, "get_placeholder_mask", placeholders), (text, "_deepstack_process", add_features))
    used = [(owner, name, method) for owner, name, method in replaced if hasattr(owner, name)]
    for owner, name, method in used:
        setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, _ in used:
            delattr(owner, name)


def add_features(hidden_states: torch.Tensor, places: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The states `[B, L, H]` with `features` `[N, H]` added at the N true `places` `[B, L]`, in order."""
    spread = torch.zeros_like(hidden_states).masked_scatter(places[..., None], features.to(hidden_states.dtype))
    return hidden_states + spread
