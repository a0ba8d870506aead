"""Frozen weights in 8-bit floating point (e4m3), in which GPUs since Ada and Hopper multiply twice as fast.

Design: both products of a frozen layer are computed in fp8, that of the forward pass and that which gives the gradient
of its input. Weights have a scale for each row of the product's result, and inputs and gradients one for each token,
computed in each pass. So a token's result does not depend on the tokens beside it, and packs equal rows up to
rounding. LoRA's products stay in the precision of training. The two products need the weight in two layouts with scales
of their own, so weights take as much memory as in bf16. Rounding weights, inputs and gradients to 4 significant bits
changes what is learned a little; adapters are evaluated with weights that are not rounded. The method is that of
https://arxiv.org/abs/2209.05433; the layer is made of PyTorch's scaled product alone, which torch.compile fuses with
what is around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lookonce.environment import best_device

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


class Fp8:
    """Frozen weights in fp8."""

    def loading_options(self, dtype: torch.dtype) -> dict[str, Any]:
        return {}

    def finish(self, model: Any) -> None:
        """Replace the decoder layers' products, one after another, on the device where the model will run."""
        layers = model.model.language_model.layers
        for name, module in [*layers.named_modules()]:
            if type(module) is nn.Linear:
                parent, _, child = name.rpartition(".")
                setattr(layers.get_submodule(parent), child, Fp8Linear(module, best_device()))

    def mismatched(self, model: Any) -> Iterator[tuple[str, Sequence[int], Sequence[int]]]:
        """None: weights are rounded after they were loaded."""
        return iter(())


class Fp8Linear(nn.Linear):
    """A frozen layer whose products are computed in fp8; for PEFT it is a Linear."""

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach().to(device)
        rows, row_scales = rounded(weight)
        columns, column_scales = rounded(weight.T.contiguous())
        for name, tensor in (("rows", rows), ("columns", columns)):  # as bytes: PEFT takes the dtype of float weights
            self.register_buffer(name, tensor.view(torch.uint8), persistent=False)
        self.register_buffer("row_scales", row_scales.T, persistent=False)
        self.register_buffer("column_scales", column_scales.T, persistent=False)
        self.register_parameter("bias", layer.bias)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The rounded weight as bytes, `[out, in]`."""
        return self.rows  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: Any = _Product
        result: torch.Tensor = product.apply(x, self.rows, self.row_scales, self.columns, self.column_scales)
        return result if self.bias is None else result + self.bias.to(result.dtype)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` `[N, K]` in fp8, and a float32 scale for each row, `[N, 1]`."""
    scale = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    return (x.float() / scale).to(FP8), scale


class _Product(torch.autograd.Function):
    """`x` times a weight, and its gradient times the same weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: Any, row_scales: Any, columns: Any, column_scales: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(columns, column_scales)
        return _product(x, rows, row_scales)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _product(gradient, *ctx.saved_tensors), None, None, None, None


def _product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """`x` `[..., K]` times the transpose of `weight` `[N, K]`, given as bytes with scales `[1, N]`."""
    values, x_scales = rounded(x.reshape(-1, x.shape[-1]))
    product = torch._scaled_mm(
        values, weight.view(FP8).T, x_scales, scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return product.to(x.dtype).view(*x.shape[:-1], -1)
