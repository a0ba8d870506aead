"""Frozen weights and LoRA's matrices as one matrix, so that LoRA costs no pass over a layer's output.

Design: with the frozen weight W `[N, K]`, LoRA's matrices A `[R, K]` and B `[N, R]`, and its scale s,

    forward    y  = [x, xA'] [W, sB]'
    backward   dx = [g, sgB] [W; A]

are two large products whose inner dimension is a little longer. So what LoRA adds to a layer's output and to its
gradient is never written and read again. Both are views of one matrix, which holds the frozen weight in place of the
layer's own, padded by `PADDING` rows and columns, since GPUs are slower with rows that are no multiple of 128 bytes.
Layers with the same input, q k v and gate up, share a matrix if their ranks fit into the padding:

    W1   sB1  0    0
    W2   0    sB2  0
    A1   0    0    0
    A2   0    0    0

The first of them computes the outputs of all, which the others hand out when they are called with the same tensor. A
and B are copied into the matrix before each forward pass. The cost: 1 to 3 % more memory for weights. The sums are
added in another order than PEFT adds them, so results agree up to rounding. It is for a GPU: on a CPU the padding costs
more than it saves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import nn

from lookonce.train.model.lora.linear import PADDING, joined_linear
from lookonce.train.model.lora.mlp import FIRST, LAST, is_gated, mlp_forward
from lookonce.train.model.lora.scaled import is_plain, scaled_forward

if find_spec("triton"):
    from lookonce.train.model.lora.kernels import scaled_copies

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), FIRST)
"""Names of layers that stock modules call with the same input."""


@contextlib.contextmanager
def joined_layers(text: Any, layers: Iterable[Any]) -> Iterator[None]:
    """Compute LoRA layers of a language model by joined matrices within the block, those that can be."""
    weights = JoinedWeights(_groups(text, [layer for layer in layers if _can_join(layer)]))
    torch.cuda.empty_cache()  # of the former weights, whose places are too small for joined ones; other runs may wait
    mlps = [module for module in text.modules() if is_gated(module) and weights.have_all(module)]
    for mlp in mlps:
        mlp.forward = MethodType(mlp_forward, mlp)
    updates = text.register_forward_pre_hook(weights.update)
    try:
        yield
    finally:
        updates.remove()
        for mlp in mlps:
            del mlp.forward
        weights.separate()
        torch.cuda.empty_cache()


class JoinedWeights:
    """The joined matrices of LoRA layers, in place of their frozen weights."""

    def __init__(self, groups: Iterable[Sequence[Any]]) -> None:
        """`groups` are PEFT's layers with one adapter each, those together that share a matrix."""
        self._groups = [*groups]
        for layers in self._groups:
            _join(layers)
        self._copies = [copy for layers in self._groups for copy in _copies(layers)]
        self._addresses: list[int] = []

    def have_all(self, mlp: Any) -> bool:
        """Whether the layers of a gated MLP have joined matrices, the first ones together, and none has a bias."""
        first, last = [getattr(mlp, name) for name in FIRST], getattr(mlp, LAST)
        has_bias = any(getattr(layer, "bias", None) is not None for layer in (*first, last))
        return not has_bias and first in self._groups and [last] in self._groups and _are_alike([*first, last])

    @torch.no_grad()
    def update(self, *args: Any) -> None:
        """Copy LoRA's matrices into the joined ones. May be called as a hook."""
        if not self._copies or not self._copies[0][1].is_cuda:
            for source, target, scale in self._copies:
                target.copy_(source * scale)
            return
        addresses = [source.data_ptr() for source, _, _ in self._copies]
        if addresses != self._addresses:
            self._addresses, self._table = addresses, self._new_table()
        scaled_copies(*self._table, like=self._copies[0][1])

    def _new_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        fields = [
            (source.data_ptr(), target.data_ptr(), *source.shape, source.stride(0), target.stride(0))
            for source, target, _ in self._copies
        ]
        device = self._copies[0][1].device
        return torch.tensor(fields, device=device), torch.tensor([scale for *_, scale in self._copies], device=device)

    def separate(self) -> None:
        """Give the layers their frozen weights back, and their former forward method.

        Without memory for copies the weights stay parts of joined matrices, which have the same values.
        """
        for first, *others in self._groups:
            del first.joined, first.others
            for layer in others:
                del layer.waiting
            for layer in (first, *others):
                with contextlib.suppress(torch.OutOfMemoryError):  # or it would hide why the training ended
                    layer.base_layer.weight.data = layer.base_layer.weight.contiguous()


def _groups(text: Any, layers: Sequence[Any]) -> list[list[Any]]:
    """Layers that share a joined matrix, and those that have one of their own."""
    left, groups = {id(layer): layer for layer in layers}, []
    for module in text.modules():
        for names in SAME_INPUT:
            members = [getattr(module, name, None) for name in names]
            are_left = all(id(member) in left for member in members)
            if are_left and _are_alike(members) and sum(map(_rank, members)) <= PADDING:
                groups.append([left.pop(id(member)) for member in members])
    return [*groups, *([layer] for layer in left.values())]


def _are_alike(layers: Sequence[Any]) -> bool:
    """Whether the ranks and scales of layers are equal."""
    return len({(_rank(layer), _scale(layer)) for layer in layers}) == 1


def _join(layers: Sequence[Any]) -> None:
    weights = [layer.base_layer.weight for layer in layers]
    rows, columns = sum(len(weight) for weight in weights), weights[0].shape[1]
    joined = weights[0].new_zeros(rows + PADDING, columns + PADDING)
    for weight, part in zip(weights, joined[:rows].split([len(weight) for weight in weights]), strict=True):
        part[:, :columns] = weight
        weight.data = part[:, :columns]
    first, *others = layers
    first.register_buffer("joined", joined, persistent=False)
    first.others, first.forward = tuple(others), MethodType(_forward, first)
    for layer in others:
        layer.waiting, layer.forward = None, MethodType(_waiting_forward, layer)


def _copies(layers: Sequence[Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """What is copied into the joined matrix of some layers: from where, to where and times what."""
    joined, begin = layers[0].joined, 0
    (rows, columns), (a, b) = (size - PADDING for size in joined.shape), zip(*map(_matrices, layers), strict=True)
    for number, layer in enumerate(layers):
        rank, end = len(a[number]), begin + len(b[number])
        of_rank = slice(number * rank, (number + 1) * rank)
        yield a[number], joined[rows:, :columns][of_rank], 1.0
        yield b[number], joined[begin:end, columns:][:, of_rank], _scale(layer)
        begin = end


def _can_join(layer: Any) -> bool:
    names, base = layer.active_adapters, layer.base_layer
    if len(names) != 1 or names[0] not in layer.lora_A or type(base) is not nn.Linear:
        return False
    a, b = _matrices(layer)
    is_float32 = a.dtype == b.dtype == torch.float32
    return is_float32 and len(a) <= PADDING and isinstance(layer.lora_dropout[names[0]], nn.Identity)


def _matrices(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def _rank(layer: Any) -> int:
    return len(_matrices(layer)[0])


def _scale(layer: Any) -> float:
    return float(layer.scaling[layer.active_adapters[0]])


def _forward(layer: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """As PEFT's forward method, of the first layer of a group; the outputs of the others wait until they are asked."""
    layers = (layer, *layer.others)
    if not all(is_plain(one, x) for one in layers) or args or options:
        return type(layer).forward(layer, x, *args, **options)  # type: ignore[no-any-return]
    a, b = ([getattr(one, matrix)[one.active_adapters[0]].weight for one in layers] for matrix in ("lora_A", "lora_B"))
    rows = x.reshape(-1, x.shape[-1]).to(layer.joined.dtype)
    product, *products, _ = joined_linear(rows, a, b, layer.joined, layer.scaling[layer.active_adapters[0]])
    for other, waiting in zip(layer.others, products, strict=True):
        other.waiting = (x, waiting)
    return _as_output(layer, product, x)


def _waiting_forward(layer: Any, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """As PEFT's forward method, of another layer of a group."""
    waiting, layer.waiting = layer.waiting, None
    if waiting is None or waiting[0] is not x or args or options:
        return scaled_forward(layer, x, *args, **options)
    return _as_output(layer, waiting[1], x)


def _as_output(layer: Any, product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    bias, result = layer.base_layer.bias, product.view(*x.shape[:-1], -1)
    return result if bias is None else result + bias.to(result.dtype)
