"""What a gated MLP computes between its products, as two Triton kernels.

Design: `both` has the products of the first two layers side by side, so compiled code would read it twice to write
their gradients side by side. These kernels read and write everything once, and leave columns for LoRA's products beside
what they write. Everything is computed in float32, and rounded where stock layers in bf16 hand a tensor on. LoRA's
products are kernels of their own, although they read the same numbers again: together they were twice as slow.

Shapes: `T` tokens, `C` inner columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

from lookonce.train.model.lora.kernels import parts

COLUMNS = 1024
"""Columns of a token that a program computes."""


@triton.jit  # type: ignore[untyped-decorator]
def _gated(both, wide, C, PADDING: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = both + row * (2 * C) + column
    gate = tl.load(source, mask=column < C, other=0.0).to(tl.float32)
    up = tl.load(source + C, mask=column < C, other=0.0).to(tl.float32)
    inner = gate * tl.sigmoid(gate) * up  # 0 in the columns beside it
    tl.store(wide + row * (C + PADDING) + column, inner.to(wide.dtype.element_ty), mask=column < C + PADDING)


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(both, of_inner, wide, inner, C, PADDING: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source, target = both + row * (2 * C) + column, wide + row * (2 * C + PADDING) + column
    gate = tl.load(source, mask=column < C, other=0.0).to(tl.float32)
    up = tl.load(source + C, mask=column < C, other=0.0).to(tl.float32)
    gradient = tl.load(of_inner + row * C + column, mask=column < C, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate, of_up = gradient * up * share * (1 + gate * (1 - share)), gradient * gate * share
    tl.store(inner + row * C + column, (gate * share * up).to(inner.dtype.element_ty), mask=column < C)
    tl.store(target, of_gate.to(wide.dtype.element_ty), mask=column < C)
    tl.store(target + C, of_up.to(wide.dtype.element_ty), mask=column < C + PADDING)


def gated(both: torch.Tensor, padding: int) -> torch.Tensor:
    """`silu(gate) * up` `[T, C + padding]` of `both` `[T, 2 C]`; what is beside it is 0."""
    tokens, columns = both.shape[0], both.shape[1] // 2
    wide = both.new_empty(tokens, columns + padding)
    wrap_triton(_gated)[(tokens, parts(columns + padding, COLUMNS))](both, wide, columns, padding, COLUMNS)
    return wide


def gated_gradient(both: torch.Tensor, of_inner: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of `silu(gate) * up` `[T, C]`: that of `both` `[T, 2 C + padding]`, and beside it 0; and
    `silu(gate) * up` `[T, C]`."""
    tokens, columns = of_inner.shape
    wide, inner = both.new_empty(tokens, 2 * columns + padding), torch.empty_like(of_inner)
    grid = (tokens, parts(columns + padding, COLUMNS))
    wrap_triton(_gradients)[grid](both, of_inner, wide, inner, columns, padding, COLUMNS)
    return wide, inner
