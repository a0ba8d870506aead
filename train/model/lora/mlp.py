"""A gated MLP with LoRA as three large products, and as little as possible between them.

Design: the stock MLP is `down(silu(gate(x)) * up(x))`, and its inner activations are three times as wide as a layer's.
What is between the products is limited by memory. So a kernel writes the input of the last product where LoRA's product
is written beside it, and another one does the same for the gradients of the first two products. The input of the last
product is computed again in the backward pass. The cost: this code has to know what the stock MLP computes, so it is
for MLPs of these three layers and SiLU, and others are computed as they are.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.library import triton_op
from torch.nn.functional import pad, silu
from transformers.activations import SiLUActivation

from lookonce.train.model.lora.linear import PADDING, narrow_product, outer_of_a, outer_of_b, wide_product
from lookonce.train.model.lora.scaled import is_plain

if find_spec("triton"):  # PyTorch looks for kernels among the globals, so that compiled code depends on their source
    from lookonce.train.model.lora.mlp_kernels import gated, gated_gradient

FIRST, LAST = ("gate_proj", "up_proj"), "down_proj"


def is_gated(module: Any) -> bool:
    """Whether a module is a gated MLP of three layers and SiLU."""
    names = {name for name, _ in module.named_children()}
    return names == {*FIRST, LAST, "act_fn"} and isinstance(module.act_fn, nn.SiLU | SiLUActivation)


def mlp_forward(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """As the stock MLP's forward method, for one with joined matrices of equal ranks and scales."""
    layers = [getattr(mlp, name) for name in (*FIRST, LAST)]
    if not all(is_plain(layer, x) for layer in layers):
        return type(mlp).forward(mlp, x)  # type: ignore[no-any-return]
    (name,) = layers[0].active_adapters
    a, b = ([getattr(layer, matrix)[name].weight for layer in layers] for matrix in ("lora_A", "lora_B"))
    first, last, scale = layers[0].joined, layers[-1].joined, layers[0].scaling[name]
    result: torch.Tensor = joined_mlp(x.reshape(-1, x.shape[-1]).to(first.dtype), a, b, first, last, scale)[0]
    return result.view(x.shape)


@triton_op("lookonce::joined_mlp", mutates_args=())
def joined_mlp(
    x: torch.Tensor,
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The MLP's output `[T, H]`, and without gradients what its gradient needs: the products of both first layers
    `[T, 2 I]`, `x A'` of both `[T, 2 R]`, and that of the last layer `[T, R]`.

    `x` `[T, H]` has the dtype of the joined matrices, of the `first` two layers and of the `last`; the matrices `a` and
    `b` of the three layers get gradients.
    """
    inner, rank, width = len(b[0]), len(a[0]), x.shape[1]
    both, small = wide_product(x, first, 2 * inner, 2 * rank)
    wide = _gated(both)
    small_inner = narrow_product(wide, last[width : width + rank, :inner], [inner])
    return wide @ last[:width].t(), both, small, small_inner


@triton_op("lookonce::joined_mlp_gradient", mutates_args=())
def _mlp_gradient(
    gradient: torch.Tensor,
    x: torch.Tensor,
    both: torch.Tensor,
    small: torch.Tensor,
    small_inner: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `x`, of A of the first layers `[2 R, H]` and the last `[R, I]`, and of B of the first layers
    `[2 I, R]` and the last `[H, R]` but for the scale."""
    width, inner, rank = x.shape[1], both.shape[1] // 2, small_inner.shape[1]
    wide = pad(gradient, (0, PADDING))
    of_small_inner = narrow_product(wide, last[:width, inner : inner + rank].t(), [width])
    of_b_last = outer_of_b(wide, small_inner, [width])
    of_inner = wide @ last[:, :inner]
    wide_both, x_last = _gated_gradient(both, of_inner)
    sizes = [inner, inner]
    of_small = narrow_product(wide_both, first[: 2 * inner, width : width + 2 * rank].t(), sizes)
    of_a_last, of_b_first = outer_of_a(x_last, of_small_inner), outer_of_b(wide_both, small, sizes)
    return wide_both @ first[:, :width], outer_of_a(x, of_small), of_a_last, of_b_first, of_b_last


def _keep_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, _, first, last, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(x, *output[1:], first, last)


def _mlp_backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    of_x, of_a_first, of_a_last, of_b_first, of_b_last = _mlp_gradient(gradient, *ctx.saved_tensors)
    of_b = [*(of_b_first * ctx.scale).chunk(2), of_b_last * ctx.scale]
    return of_x, [*of_a_first.chunk(2), of_a_last], of_b, None, None, None


joined_mlp.register_autograd(_mlp_backward, setup_context=_keep_mlp)


def _gated(both: torch.Tensor) -> torch.Tensor:
    """The input of the last layer, and columns for LoRA's product: `[T, I + PADDING]`."""
    if both.is_cuda:
        return gated(both, PADDING)
    gate, up = both.chunk(2, 1)
    return pad(silu(gate) * up, (0, PADDING))


def _gated_gradient(both: torch.Tensor, of_inner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of the last layer's input `[T, I]`: that of `both`, and columns for LoRA's products,
    `[T, 2 I + PADDING]`; and the last layer's input again."""
    if both.is_cuda:
        return gated_gradient(both, of_inner, PADDING)
    gate, up = both.chunk(2, 1)
    share = gate.sigmoid()
    of_gate, of_up = of_inner * up * share * (1 + gate * (1 - share)), of_inner * gate * share
    return pad(torch.cat((of_gate, of_up), 1), (0, PADDING)), silu(gate) * up
