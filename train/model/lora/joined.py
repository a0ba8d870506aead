"""A frozen weight and LoRA's matrices as one matrix, so that LoRA costs no pass over a layer's output.

Design: with the frozen weight W `[N, K]`, LoRA's matrices A `[R, K]` and B `[N, R]`, and its scale s,

    forward    y  = [x, xA'] [W, sB]'
    backward   dx = [g, sgB] [W; A]

are two large products whose inner dimension is a little longer. So what LoRA adds to a layer's output and to its
gradient is never written and read again. Both are views of one matrix, which holds the frozen weight in place of the
layer's own, padded by `PADDING` rows and columns, since GPUs are slower with rows that are no multiple of 128 bytes:

    W   sB  0
    A   0   0

A and B are copied into it before each forward pass. The cost: 1 to 3 % more memory for weights. The sums are added in
another order than PEFT adds them, so results agree up to rounding. It is for a GPU: on a CPU the padding costs more
than it saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.library import triton_op
from torch.nn.functional import pad

from lookonce.train.model.lora.scaled import is_plain

if find_spec("triton"):  # PyTorch looks for kernels among the globals, so that compiled code depends on their source
    from lookonce.train.model.lora.kernels import parts_of_outer, scaled_copies, times_narrow

PADDING = 64
"""Rows and columns beside the frozen weight, and the largest rank."""


@contextlib.contextmanager
def joined_layers(text: Any, layers: Iterable[Any]) -> Iterator[None]:
    """Compute LoRA layers of a language model by joined matrices within the block, those that can be."""
    weights = JoinedWeights([layer for layer in layers if _can_join(layer)])
    torch.cuda.empty_cache()  # of the former weights, whose places are too small for joined ones; other runs may wait
    updates = text.register_forward_pre_hook(weights.update)
    try:
        yield
    finally:
        updates.remove()
        weights.separate()
        torch.cuda.empty_cache()


class JoinedWeights:
    """The joined matrices of LoRA layers, in place of their frozen weights."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """`layers` are PEFT's, with one adapter each."""
        self._layers = layers
        for layer in layers:
            weight = layer.base_layer.weight
            rows, columns = weight.shape
            joined = weight.new_zeros(rows + PADDING, columns + PADDING)
            joined[:rows, :columns] = weight
            weight.data = joined[:rows, :columns]
            layer.register_buffer("joined", joined, persistent=False)
            layer.forward = MethodType(_forward, layer)
        self._copies = [copy for layer in layers for copy in _copies(layer)]
        self._addresses: list[int] = []

    @torch.no_grad()
    def update(self, *args: Any) -> None:
        """Copy LoRA's matrices into the joined ones. May be called as a hook."""
        if not self._layers or not self._layers[0].joined.is_cuda:
            for source, target, scale in self._copies:
                target.copy_(source * scale)
            return
        addresses = [source.data_ptr() for source, _, _ in self._copies]
        if addresses != self._addresses:
            self._addresses, self._table = addresses, self._new_table()
        scaled_copies(*self._table, like=self._layers[0].joined)

    def _new_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        fields = [
            (source.data_ptr(), target.data_ptr(), *source.shape, source.stride(0), target.stride(0))
            for source, target, _ in self._copies
        ]
        device = self._layers[0].joined.device
        return torch.tensor(fields, device=device), torch.tensor([scale for *_, scale in self._copies], device=device)

    def separate(self) -> None:
        """Give the layers their frozen weights back, and their former forward method."""
        for layer in self._layers:
            layer.base_layer.weight.data = layer.base_layer.weight.contiguous()
            del layer.joined


def _copies(layer: Any) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """What is copied into a layer's joined matrix: from where, to where and times what."""
    (name,) = layer.active_adapters
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    rows, columns, rank = len(b), a.shape[1], len(a)
    return [
        (a, layer.joined[rows : rows + rank, :columns], 1.0),
        (b, layer.joined[:rows, columns : columns + rank], float(layer.scaling[name])),
    ]


def _can_join(layer: Any) -> bool:
    names, base = layer.active_adapters, layer.base_layer
    if len(names) != 1 or names[0] not in layer.lora_A or type(base) is not nn.Linear:
        return False
    a, b = layer.lora_A[names[0]].weight, layer.lora_B[names[0]].weight
    is_float32 = a.dtype == b.dtype == torch.float32
    return is_float32 and len(a) <= PADDING and isinstance(layer.lora_dropout[names[0]], nn.Identity)


def _forward(layer: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """As PEFT's forward method."""
    if not is_plain(layer, x) or args or options:
        return type(layer).forward(layer, x, *args, **options)  # type: ignore[no-any-return]
    (name,) = layer.active_adapters
    a, b, scale = layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]
    product, _ = joined_linear(x.reshape(-1, x.shape[-1]).to(layer.joined.dtype), a, b, layer.joined, scale)
    bias = layer.base_layer.bias
    result: torch.Tensor = product.view(*x.shape[:-1], -1)
    return result if bias is None else result + bias.to(result.dtype)


@triton_op("lookonce::joined_linear", mutates_args=())
def joined_linear(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, joined: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x (W + s B A)'` `[T, N]` and `x A'` `[T, R]`, of which only the first has a gradient.

    `x` `[T, K]` has the dtype of `joined`, which holds W, A and B; `a` `[R, K]` and `b` `[N, R]` get gradients.
    """
    (rank, columns), rows = a.shape, len(b)
    return _wide_product(x, joined[:rows], joined[rows : rows + rank, :columns])


@triton_op("lookonce::joined_linear_gradient", mutates_args=())
def _gradient(gradient: torch.Tensor, joined: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = joined.shape[0] - PADDING, joined.shape[1] - PADDING
    return _wide_product(gradient, joined[:, :columns].t(), joined[:rows, columns : columns + rank].t())


def _wide_product(x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[x, x narrow'] weight'` and `x narrow'`."""
    wide = pad(x, (0, PADDING))
    small = _times_narrow(wide, narrow)
    return wide @ weight.t(), small


def _times_narrow(wide: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
    if wide.is_cuda:
        return times_narrow(wide, narrow)
    rank, columns = narrow.shape
    small = wide[:, :columns] @ narrow.t()
    wide[:, columns : columns + rank] = small
    return small


@triton_op("lookonce::parts_of_outer", mutates_args=())
def _parts_of_outer(wide: torch.Tensor, narrow: torch.Tensor, transposed: bool) -> torch.Tensor:
    if wide.is_cuda:
        return parts_of_outer(wide.contiguous(), narrow.contiguous(), transposed=transposed)
    total = wide.t().float() @ narrow.float()
    return (total.t().contiguous() if transposed else total)[None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, _, _, joined, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], joined)


def _backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[Any, ...]:
    x, small, joined = ctx.saved_tensors
    of_x, of_small = _gradient(gradient, joined, small.shape[1])
    of_a = _parts_of_outer(x, of_small, True).sum(0)
    of_b = _parts_of_outer(gradient, small, False).sum(0) * ctx.scale
    return of_x, of_a, of_b, None, None


joined_linear.register_autograd(_backward, setup_context=_keep)
