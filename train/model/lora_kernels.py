"""LoRA's own small products and a gated MLP's inner steps on a GPU, as Triton kernels.

LoRA's products are limited by memory, since one of their factors is as wide as a layer and the other has as many
columns as LoRA's rank. Each kernel reads the wide factor once, in place, and adds in float32. Sums over tokens are
split among the GPU's processors, and the parts are added in a fixed order, so results do not change from run to run.
PyTorch's products would need copies: they cannot write into the columns of a wider matrix, and round gradients to bf16.

Of an MLP, `both` has the products of the first two layers side by side, so compiled code would read it twice. These
kernels read and write everything once, and leave columns for LoRA's products. They compute in float32, and round where
stock layers in bf16 hand a tensor on. With LoRA's products in the same kernels they were twice as slow.

Shapes: `T` tokens, `C` columns of the wide factor, of up to three members that lie side by side, or inner columns of an
MLP, `R` rank of a member.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch.library import wrap_triton

NARROW = {16: (64, 128, 4), 32: (64, 64, 6), 64: (64, 64, 6)}
"""For each padded rank: tokens of a program of `times_narrow`, columns that it reads at a time, and how often ahead."""
SUMMED = (64, 128, 4)
"""Tokens that a program of `parts_of_outer` reads at a time, its columns, and how often it reads ahead."""
NUM_PROGRAMS = 264
"""Into how many programs a sum over tokens is split: two for each processor of an H100."""
NUM_COPIES = 4
"""Programs that copy one matrix."""
COPIED = 1024
"""Numbers that a program copies at a time."""
FIELDS = 6
"""Integers that describe a copy: two addresses, rows, columns, and the distances of rows."""
COLUMNS = 1024
"""Columns of a token that a program computes."""


@triton.jit  # type: ignore[untyped-decorator]
def _times_narrow(  # type: ignore[no-untyped-def]
    wide,
    narrow,
    out,
    T,
    C,
    R,
    first,
    second,
    narrow_row,
    narrow_column,
    wide_row,
    out_row,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    member = tl.program_id(1)
    begin = tl.where(member == 0, 0, tl.where(member == 1, first, second))
    end = tl.where(member == 0, first, tl.where(member == 1, second, C))
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rank = tl.arange(0, RANK)
    rows = wide + token[:, None].to(tl.int64) * wide_row
    own = member * R + rank
    total = tl.zeros((TOKENS, RANK), dtype=tl.float32)
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        part = tl.load(rows + column[None], mask=(token[:, None] < T) & (column[None] < end), other=0.0)
        at = narrow + own[None] * narrow_row + column[:, None] * narrow_column
        small = tl.load(at, mask=(rank[None] < R) & (column[:, None] < end), other=0.0)
        total = tl.dot(part, small, total, input_precision="ieee")
    inside = (token[:, None] < T) & (rank[None] < R)
    result = total.to(wide.dtype.element_ty)
    tl.store(rows + C + own[None], result, mask=inside)
    tl.store(out + token[:, None] * out_row + own[None], result, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _sums_of_outer(  # type: ignore[no-untyped-def]
    wide,
    narrow,
    out,
    T,
    C,
    R,
    first,
    second,
    wide_row,
    narrow_row,
    tokens_each,
    out_column,
    out_rank,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    chunk, ends_first = tl.program_id(0), tl.cdiv(first, COLUMNS)
    ends_second = ends_first + tl.cdiv(second - first, COLUMNS)
    member = (chunk >= ends_first).to(tl.int32) + (chunk >= ends_second).to(tl.int32)
    before = tl.where(member == 0, 0, tl.where(member == 1, ends_first, ends_second))
    begin = tl.where(member == 0, 0, tl.where(member == 1, first, second))
    end = tl.where(member == 0, first, tl.where(member == 1, second, C))
    column = begin + (chunk - before) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANK)
    total = tl.zeros((COLUMNS, RANK), dtype=tl.float32)
    for start in range(0, tokens_each, TOKENS):
        of_program = start + tl.arange(0, TOKENS)
        token = tl.program_id(1) * tokens_each + of_program
        is_token = (of_program < tokens_each) & (token < T)
        at = wide + token[:, None].to(tl.int64) * wide_row + column[None]
        part = tl.load(at, mask=is_token[:, None] & (column[None] < end), other=0.0)
        at = narrow + token[:, None] * narrow_row + member * R + rank[None]
        small = tl.load(at, mask=is_token[:, None] & (rank[None] < R), other=0.0)
        total = tl.dot(tl.trans(part), small, total, input_precision="ieee")
    at = out + tl.program_id(1).to(tl.int64) * C * R + column[:, None] * out_column + rank[None] * out_rank
    tl.store(at, total, mask=(column[:, None] < end) & (rank[None] < R))


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


def times_narrow(wide: torch.Tensor, narrow: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The product `[T, R of all]` of the first columns of `wide` and `narrow` `[R of all, C]`, also written into the
    next columns. Of `narrow` only a block for each member is read: its rows, and its columns, as many as `sizes` says.
    """
    (ranks, columns), tokens = narrow.shape, wide.shape[0]
    rank = ranks // len(sizes)
    out = wide.new_empty(tokens, ranks)
    *at_a_time, ahead = NARROW[padded(rank)]
    numbers: tuple[int, ...] = (tokens, columns, rank, *_ends(sizes), *narrow.stride(), wide.stride(0), ranks)
    options = {"num_warps": 4, "num_stages": _that_fit(ahead, at_a_time, rank, wide)}
    grid = (parts(tokens, at_a_time[0]), len(sizes))
    wrap_triton(_times_narrow)[grid](wide, narrow, out, *numbers, padded(rank), *at_a_time, **options)
    return out


def parts_of_outer(wide: torch.Tensor, narrow: torch.Tensor, sizes: Sequence[int], *, transposed: bool) -> torch.Tensor:
    """The sum over tokens of the outer products of rows of `wide` `[T, C]` and `narrow` `[T, R of all]`, in float32 and
    in parts: `[parts, C, R]`, or `[parts, R, C]` if `transposed`. Each member has as many columns as `sizes` says, and
    its own columns of `narrow`. Rows of `wide` are contiguous, and all of `narrow`."""
    tokens, columns, rank = wide.shape[0], sum(sizes), narrow.shape[1] // len(sizes)
    blocks = sum(parts(size, SUMMED[1]) for size in sizes)
    num_parts, tokens_each = _split(tokens, blocks)
    shape, strides = ((rank, columns), (1, columns)) if transposed else ((columns, rank), (rank, 1))
    out = torch.empty(num_parts, *shape, dtype=torch.float32, device=wide.device)
    numbers = (tokens, columns, rank, *_ends(sizes), wide.stride(0), narrow.shape[1], tokens_each, *strides)
    *at_a_time, ahead = SUMMED
    options = {"num_warps": 4, "num_stages": _that_fit(ahead, at_a_time, rank, wide)}
    wrap_triton(_sums_of_outer)[(blocks, num_parts)](wide, narrow, out, *numbers, padded(rank), *at_a_time, **options)
    return out


def scaled_copies(table: torch.Tensor, scales: torch.Tensor, like: torch.Tensor) -> None:
    """Copy float32 matrices, times their scales, into matrices of the dtype of `like`.

    `table` `[copies, FIELDS]`, int64: addresses of the source and the target, rows, columns, and the number of elements
    from row to row in both.
    """
    _scaled_copies[(len(table), NUM_COPIES)](table, scales, like, FIELDS, COPIED)


def _split(tokens: int, blocks: int) -> tuple[int, int]:
    """Into how many parts a sum over tokens is split if `blocks` programs work on each, and the tokens of a part: a
    multiple of 16, as a capture cannot compile a kernel for other numbers."""
    num_parts = max(NUM_PROGRAMS // blocks, 1)
    return num_parts, SUMMED[0] * parts(parts(tokens, num_parts), SUMMED[0])


def _that_fit(ahead: int, at_a_time: Sequence[int], rank: int, wide: torch.Tensor) -> int:
    """How often to read tokens and columns of both factors ahead: fewer times on a GPU with less shared memory."""
    numbers = at_a_time[0] * at_a_time[1] + max(at_a_time) * padded(rank)
    return max(min(ahead, _shared_memory(wide.device) // (numbers * wide.element_size())), 1)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program can have: 227 KiB on an H100, 99 KiB on GPUs for workstations, 64 KiB on a T4."""
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def parts(number: int, size: int) -> int:
    """How many parts of a size have this number of elements."""
    return (number + size - 1) // size


def padded(rank: int) -> int:
    """The columns of a small factor's part in a kernel: a power of two that matrix products can have."""
    return max(16, 1 << (rank - 1).bit_length())


def _ends(sizes: Sequence[int]) -> tuple[int, int]:
    """The columns at which the first and the second member end."""
    return sizes[0], sum(sizes[:2])


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
