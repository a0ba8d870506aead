"""The stock model's forward pass over a pack, without host-device syncs.

Design: Boolean indexing, count checks and `.tolist()` force a host-device sync, after which the GPU is idle until the
CPU has launched new kernels. transformers' model has about ten per forward pass: where it finds the image tokens, where
it splits features into images, and in each DeepStack level. The same values are computed without syncs: the counts are
known when the pack is made, and features are added as a tensor that is zero elsewhere. Two methods of the stock model
are replaced inside a context manager. A test checks that they exist and that no bit of the result changes. The cost is
an addition over the whole pack in each DeepStack level, a tenth of a millisecond.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def without_syncs(model: Any) -> Iterator[None]:
    """Replace the methods of a model that sync when they add images to text. `model` is without PEFT's wrapper."""
    inner, text = model.model, model.model.language_model
    image_token_id: int = inner.config.image_token_id

    def placeholders(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return (input_ids == image_token_id)[..., None], None

    replaced = ((inner, "get_placeholder_mask", placeholders), (text, "_deepstack_process", add_features))
    used = [(owner, name, method) for owner, name, method in replaced if hasattr(owner, name)]
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in used]
    for owner, name, method in used:
        setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, outer in before:
            if outer:  # within another block
                setattr(owner, name, outer)
            else:
                delattr(owner, name)


def add_features(hidden_states: torch.Tensor, is_image: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """`hidden_states` `[B, L, H]` plus `features` `[N, H]` at the `N` true positions of `is_image` `[B, L]`."""
    scattered = torch.zeros_like(hidden_states).masked_scatter(is_image[..., None], features.to(hidden_states.dtype))
    return hidden_states + scattered
