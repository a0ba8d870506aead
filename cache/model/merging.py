"""Token merging: after the tower, similar tokens of an image become one (`cache.keep`).

Design: bipartite soft matching, as in ToMe (https://arxiv.org/abs/2210.09461), on the tower's output instead of inside
it. The tokens of an image alternate between two sets, A and B. Each token of A is paired with the most similar one of B
(cosine of level 0), and the most similar pairs become one token, at most half of the tokens in a round. What is merged
is the mean of all its tokens, in each level alike. The token of B is the kept one: the mean has its place in the order
and its positions. Ties go to the first token.

It computes in float32 and one image at a time, so an image does not depend on its batch. Sums are matrix products,
because these have the same bits each time on a GPU. An image of 500 tokens of the 8B takes 5 GFLOP, and 2,300 in the
tower. The other cost is that no other program merges in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lookonce.cache.model.kept import num_kept


class Merged(NamedTuple):
    """An image after merging."""

    features: torch.Tensor
    """`[num_kept, num_levels, hidden]`, in the dtype of the image's features."""
    kept: torch.Tensor
    """`[num_kept]`, int32, ascending: the indices of the kept tokens among all tokens of the image."""
    sizes: torch.Tensor
    """`[num_kept]`: how many tokens each is the mean of."""


def merge_tokens(features: torch.Tensor, counts: Sequence[int], keep: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The merged features of several images with `counts` tokens, and the indices of the kept tokens of each image."""
    images = [merge_image(image, num_kept(len(image), keep)) for image in torch.split(features, list(counts))]
    return torch.cat([image.features for image in images]), torch.cat([image.kept for image in images])


def merge_image(features: torch.Tensor, num_left: int) -> Merged:
    """Merge the tokens of an image, `[num_tokens, num_levels, hidden]`, until `num_left` are left."""
    whole = features.float()
    of_token = kept = torch.arange(len(features), device=features.device)  # `of_token`: what each token is part of
    tokens, sizes = whole, torch.ones_like(kept)
    while len(kept) > num_left:
        num_now = max(num_left, len(kept) - len(kept) // 2)
        into = _pairs(tokens[:, 0], len(kept) - num_now)
        numbers = torch.arange(len(kept), device=features.device)
        left = (into != numbers).int().argsort(stable=True)[:num_now]  # indexing by booleans forces a sync
        renumbered = torch.zeros_like(numbers).scatter(0, left, numbers[:num_now])
        of_token, kept = renumbered[into[of_token]], kept[left]
        tokens, sizes = _means(whole, of_token, num_now)
    return Merged(tokens.to(features.dtype), kept.int(), sizes)


def _pairs(tokens: torch.Tensor, num_merged: int) -> torch.Tensor:
    """For each of some tokens `[N, hidden]` the number of the one that it is merged into; for most it is its own."""
    direction = torch.nn.functional.normalize(tokens, dim=-1)
    similarity, partner = (direction[0::2] @ direction[1::2].T).max(dim=1)
    chosen = similarity.argsort(descending=True, stable=True)[:num_merged]
    into = torch.arange(len(tokens), device=tokens.device)
    return into.scatter(0, 2 * chosen, 2 * partner[chosen] + 1)


def _means(whole: torch.Tensor, of_token: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the parts of each of `number` tokens, in each level, and how many parts it has."""
    is_part = (torch.arange(number, device=whole.device)[:, None] == of_token).float()
    sizes = is_part.sum(dim=1)
    means = is_part @ whole.flatten(1) / sizes[:, None]
    return means.view(number, *whole.shape[1:]), sizes.long()
