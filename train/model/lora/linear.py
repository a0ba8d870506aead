"""LoRA layers with the same input as two large products, one forward and one backward.

Design: see `joined`. The operator returns an output for each layer, and compiled code reads them where the product has
written them. LoRA's own products of all layers read the input once. PyTorch has to know the operator's gradient, as it
is made of Triton's kernels; on a CPU the same sums are PyTorch's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch.library import triton_op
from torch.nn.functional import pad

if find_spec("triton"):  # PyTorch looks for kernels among the globals, so that compiled code depends on their source
    from lookonce.train.model.lora.kernels import parts_of_outer, times_narrow

PADDING = 64
"""Rows and columns of a joined matrix beside the frozen weights, and the largest sum of ranks."""


@triton_op("lookonce::joined_linear", mutates_args=())
def joined_linear(
    x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], joined: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """`x (W + s B A)'` `[T, N]` of each layer; the last tensor, `x A'` of all layers, has no gradient.

    `x` `[T, K]` has the dtype of `joined`, which holds W, A and B; `a` `[R, K]` and `b` `[N, R]` get gradients.
    """
    sizes = [len(one) for one in b]
    product, small = wide_product(x, joined, sum(sizes), sum(len(one) for one in a))
    if len(sizes) == 1:
        return [product, small]
    return [*(part.clone(memory_format=torch.contiguous_format) for part in torch.split(product, sizes, 1)), small]


@triton_op("lookonce::joined_linear_gradient", mutates_args=())
def _linear_gradient(
    gradients: list[torch.Tensor], x: torch.Tensor, small: torch.Tensor, joined: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `x`, of all matrices A `[R of all, K]`, and of all B `[N of all, R]` but for the scale."""
    sizes, columns, rank = [one.shape[1] for one in gradients], x.shape[1], small.shape[1]
    wide = torch.cat([*gradients, gradients[0].new_zeros(x.shape[0], PADDING)], 1)
    of_small = narrow_product(wide, joined[: sum(sizes), columns : columns + rank].t(), sizes)
    return wide @ joined[:, :columns], outer_of_a(x, of_small), outer_of_b(wide, small, sizes)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, _, _, joined, ctx.scale = inputs
    ctx.mark_non_differentiable(output[-1])
    ctx.sizes = [part.shape[1] for part in output[:-1]]
    ctx.save_for_backward(x, output[-1], joined)


def _linear_backward(ctx: Any, gradients: list[torch.Tensor]) -> tuple[Any, ...]:
    of_x, of_a, of_b = _linear_gradient(gradients[:-1], *ctx.saved_tensors)
    return of_x, list(of_a.chunk(len(ctx.sizes))), list(torch.split(of_b * ctx.scale, ctx.sizes)), None, None


joined_linear.register_autograd(_linear_backward, setup_context=_keep_linear)


def wide_product(x: torch.Tensor, joined: torch.Tensor, rows: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[x, x A'] [W, s B]'` `[T, rows]` and `x A'` `[T, rank]`."""
    columns = x.shape[1]
    wide = pad(x, (0, PADDING))
    small = narrow_product(wide, joined[rows : rows + rank, :columns], [columns])
    return wide @ joined[:rows].t(), small


def narrow_product(wide: torch.Tensor, narrow: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The product `[T, R]` of the first columns of `wide` and `narrow` `[R, C]`, also written into the next columns.

    `narrow` has a block of rows for each of the `sizes` and is 0 where the columns are those of another one.
    """
    if wide.is_cuda:
        return times_narrow(wide, narrow, sizes)
    rank, columns = narrow.shape
    small = wide[:, :columns] @ narrow.t()
    wide[:, columns : columns + rank] = small
    return small


def outer_of_a(x: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
    """The sum over tokens of the outer products of `small` `[T, R]` and `x` `[T, K]`, in float32: `[R, K]`."""
    if x.is_cuda:
        return parts_of_outer(x.contiguous(), small, [x.shape[1]], transposed=True).sum(0)
    return small.float().t() @ x.float()


def outer_of_b(wide: torch.Tensor, small: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The same for the first columns of `wide` and, for each of the `sizes` of columns, its own columns of `small`,
    transposed: `[C, R]`."""
    if wide.is_cuda:
        return parts_of_outer(wide, small, sizes, transposed=False).sum(0)
    columns = torch.split(wide[:, : sum(sizes)].float().t(), [*sizes])
    return torch.cat([part @ own for part, own in zip(columns, small.float().chunk(len(sizes), 1), strict=True)])
