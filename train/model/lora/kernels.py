"""LoRA's own small products on a GPU, as Triton kernels.

Design: these products are limited by memory, since one of their two factors is as wide as a layer and the other has as
many columns as LoRA's rank. Each kernel reads the wide factor once, in place, and adds in float32. Sums over tokens are
split among the GPU's processors, and the parts are added in a fixed order, so results do not change from run to run.
PyTorch's products would need copies: they cannot write into the columns of a wider matrix, and round gradients to bf16.

Shapes: `T` tokens, `C` columns of the wide factor, `R` rank, at most `PADDING`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

TOKENS, COLUMNS = 64, 128
"""The part of a wide factor that a kernel reads at a time."""
NUM_PROGRAMS = 528
"""Into how many programs a sum over tokens is split: four for each processor of an H100."""
NUM_COPIES = 4
"""Programs that copy one matrix."""
COPIED = 1024
"""Numbers that a program copies at a time."""
FIELDS = 6
"""Integers that describe a copy: two addresses, rows, columns, and the distances of rows."""
PIPELINED: dict[str, Any] = {"num_warps": 4, "num_stages": 4}


@triton.jit  # type: ignore[untyped-decorator]
def _times_narrow(  # type: ignore[no-untyped-def]
    wide,
    narrow,
    out,
    T,
    C,
    R,
    narrow_row,
    narrow_column,
    wide_row,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rank = tl.arange(0, RANK)
    begins = wide + token[:, None].to(tl.int64) * wide_row
    total = tl.zeros((TOKENS, RANK), dtype=tl.float32)
    for first in range(0, C, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        part = tl.load(begins + column[None], mask=(token[:, None] < T) & (column[None] < C), other=0.0)
        at = narrow + rank[None] * narrow_row + column[:, None] * narrow_column
        small = tl.load(at, mask=(rank[None] < R) & (column[:, None] < C), other=0.0)
        total = tl.dot(part, small, total, input_precision="ieee")
    inside = (token[:, None] < T) & (rank[None] < R)
    result = total.to(wide.dtype.element_ty)
    tl.store(begins + C + rank[None], result, mask=inside)
    tl.store(out + token[:, None] * R + rank[None], result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_outer(  # type: ignore[no-untyped-def]
    wide,
    narrow,
    out,
    T,
    C,
    R,
    wide_row,
    tokens_each,
    out_column,
    out_rank,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANK)
    total = tl.zeros((COLUMNS, RANK), dtype=tl.float32)
    for first in range(0, tokens_each, TOKENS):
        of_program = first + tl.arange(0, TOKENS)
        token = tl.program_id(1) * tokens_each + of_program
        is_token = (of_program < tokens_each) & (token < T)
        at = wide + token[:, None].to(tl.int64) * wide_row + column[None]
        part = tl.load(at, mask=is_token[:, None] & (column[None] < C), other=0.0)
        at = narrow + token[:, None] * R + rank[None]
        small = tl.load(at, mask=is_token[:, None] & (rank[None] < R), other=0.0)
        total = tl.dot(tl.trans(part), small, total, input_precision="ieee")
    at = out + tl.program_id(1).to(tl.int64) * C * R + column[:, None] * out_column + rank[None] * out_rank
    tl.store(at, total, mask=(column[:, None] < C) & (rank[None] < R))


@triton.jit  # type: ignore[untyped-decorator]
def _scaled_copies(table, scales, like, FIELDS: tl.constexpr, COPIED: tl.constexpr):  # type: ignore[no-untyped-def]
    entry = table + tl.program_id(0) * FIELDS
    source = tl.load(entry).to(tl.pointer_type(tl.float32))
    target = tl.load(entry + 1).to(tl.pointer_type(like.dtype.element_ty))
    rows, columns = tl.load(entry + 2), tl.load(entry + 3)
    source_row, target_row = tl.load(entry + 4), tl.load(entry + 5)
    scale = tl.load(scales + tl.program_id(0))
    for first in range(tl.program_id(1) * COPIED, rows * columns, tl.num_programs(1) * COPIED):
        index = first + tl.arange(0, COPIED)
        row, column, inside = index // columns, index % columns, index < rows * columns
        number = tl.load(source + row * source_row + column, mask=inside)
        tl.store(target + row * target_row + column, (number * scale).to(like.dtype.element_ty), mask=inside)


def times_narrow(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    """The product `[T, R]` of the first columns of `wide` and `narrow` `[R, C]`, also written into the next columns."""
    (rank, columns), tokens = narrow.shape, wide.shape[0]
    out = wide.new_empty(tokens, rank)
    sizes, strides = (tokens, columns, rank), (*narrow.stride(), wide.stride(0))
    wrap_triton(_times_narrow)[(_parts(tokens, TOKENS),)](
        wide, narrow, out, *sizes, *strides, _padded(rank), TOKENS, COLUMNS, **PIPELINED
    )
    return out


def parts_of_outer(wide: torch.Tensor, narrow: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """The sum over tokens of the outer products of rows of `wide` `[T, C]` and `narrow` `[T, R]`, in float32 and in
    parts: `[parts, C, R]`, or `[parts, R, C]` if `transposed`. Rows of `wide` are contiguous, and all of `narrow`."""
    (tokens, columns), rank = wide.shape, narrow.shape[1]
    blocks = _parts(columns, COLUMNS)
    parts = max(NUM_PROGRAMS // blocks, 1)
    shape, strides = ((rank, columns), (1, columns)) if transposed else ((columns, rank), (rank, 1))
    out = torch.empty(parts, *shape, dtype=torch.float32, device=wide.device)
    tokens_each = TOKENS * _parts(_parts(tokens, parts), TOKENS)  # a multiple of 16: a capture cannot compile
    sizes = (tokens, columns, rank, wide.stride(0), tokens_each, *strides)
    wrap_triton(_sums_of_outer)[(blocks, parts)](wide, narrow, out, *sizes, _padded(rank), TOKENS, COLUMNS, **PIPELINED)
    return out


def scaled_copies(table: torch.Tensor, scales: torch.Tensor, like: torch.Tensor) -> None:
    """Copy float32 matrices, times their scales, into matrices of the dtype of `like`.

    `table` `[copies, FIELDS]`, int64: addresses of the source and the target, rows, columns, and the number of elements
    from row to row in both.
    """
    _scaled_copies[(len(table), NUM_COPIES)](table, scales, like, FIELDS, COPIED)


def _parts(number: int, size: int) -> int:
    return (number + size - 1) // size


def _padded(rank: int) -> int:
    return max(16, 1 << (rank - 1).bit_length())
