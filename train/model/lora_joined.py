"""Frozen weights and LoRA's matrices as one matrix, so that LoRA costs no pass over a layer's output.

With the frozen weight W `[N, K]`, LoRA's matrices A `[R, K]` and B `[N, R]`, and its scale s,

    forward    y  = [x, xA'] [W, sB]'
    backward   dx = [g, sgB] [W; A]

are two large products whose inner dimension is a little longer. So what LoRA adds is never written and read again. Both
are views of one matrix, which holds the frozen weight in place of the layer's own, padded by `PADDING` rows and
columns, since GPUs are slower with rows that are no multiple of 128 bytes. Layers with the same input, q k v and gate
up, share a matrix if their ranks fit into the padding:

    W1   sB1  0    0
    W2   0    sB2  0
    A1   0    0    0
    A2   0    0    0

The first of them computes the outputs of all, which the others hand out when they are called with the same tensor. A
and B are copied into the matrix before each forward pass. The cost: 1 to 3 % more memory for weights. Sums are added in
another order than PEFT adds them, so results agree up to rounding. On a CPU the padding costs more than it saves.
PyTorch has to know the gradient of the operators, as they are made of Triton's kernels.

A gated MLP, `down(silu(gate(x)) * up(x))`, is three large products, and what is between them is limited by memory. So a
kernel writes the input of the last product where LoRA's product is written beside it, and another one does the same for
the gradients of the first two products. The input of the last product is computed again in the backward pass. The cost:
this code has to know what the stock MLP computes, so it is for MLPs of these three layers and SiLU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from lookonce.train.model.load import replaced
from lookonce.train.model.lora import is_plain, scaled_forward

if find_spec("triton"):
    from lookonce.train.model.lora_kernels import gated, gated_gradient, parts_of_outer, scaled_copies, times_narrow

PADDING = 64
"""Rows and columns of a joined matrix beside the frozen weights, and the largest sum of ranks."""
FIRST, LAST = ("gate_proj", "up_proj"), "down_proj"
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), FIRST)
"""Names of layers that stock modules call with the same input."""


# Operators stand after what they call by name: PyTorch follows these names to the kernels when it defines an operator,
# so that compiled code depends on their source. It would follow the names of its own functions too, for a second.


def wide_product(x: torch.Tensor, joined: torch.Tensor, rows: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[x, x A'] [W, s B]'` `[T, rows]` and `x A'` `[T, rank]`."""
    columns = x.shape[1]
    wide = functional.pad(x, (0, PADDING))
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


def _gated(both: torch.Tensor) -> torch.Tensor:
    """The input of the last layer, and columns for LoRA's product: `[T, I + PADDING]`."""
    if both.is_cuda:
        return gated(both, PADDING)
    gate, up = both.chunk(2, 1)
    return functional.pad(functional.silu(gate) * up, (0, PADDING))


def _gated_gradient(both: torch.Tensor, of_inner: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of the last layer's input `[T, I]`: that of `both`, and columns for LoRA's products,
    `[T, 2 I + PADDING]`; and the last layer's input again."""
    if both.is_cuda:
        return gated_gradient(both, of_inner, PADDING)
    gate, up = both.chunk(2, 1)
    share = gate.sigmoid()
    of_gate, of_up = of_inner * up * share * (1 + gate * (1 - share)), of_inner * gate * share
    return functional.pad(torch.cat((of_gate, of_up), 1), (0, PADDING)), functional.silu(gate) * up


@torch.library.triton_op("lookonce::joined_linear", mutates_args=())
def joined_linear(
    x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], joined: torch.Tensor, scale: float
) -> list[torch.Tensor]:
    """`x (W + s B A)'` `[T, N]` of each layer; the last tensor, `x A'` of all layers, has no gradient.

    `x` `[T, K]` has the dtype of `joined`, which holds W, A and B; `a` `[R, K]` and `b` `[N, R]` get gradients.
    """
    sizes = [len(matrix) for matrix in b]
    product, small = wide_product(x, joined, sum(sizes), sum(len(matrix) for matrix in a))
    if len(sizes) == 1:
        return [product, small]
    return [*(part.clone(memory_format=torch.contiguous_format) for part in torch.split(product, sizes, 1)), small]


@torch.library.triton_op("lookonce::joined_linear_gradient", mutates_args=())
def _linear_gradient(
    gradients: list[torch.Tensor], x: torch.Tensor, small: torch.Tensor, joined: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `x`, of all matrices A `[R of all, K]`, and of all B `[N of all, R]` but for the scale."""
    sizes, columns, rank = [gradient.shape[1] for gradient in gradients], x.shape[1], small.shape[1]
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


@torch.library.triton_op("lookonce::joined_mlp", mutates_args=())
def joined_mlp(
    x: torch.Tensor, a: list[torch.Tensor], b: list[torch.Tensor], first: torch.Tensor, last: torch.Tensor, scale: float
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


@torch.library.triton_op("lookonce::joined_mlp_gradient", mutates_args=())
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
    wide = functional.pad(gradient, (0, PADDING))
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


@contextlib.contextmanager
def joined_layers(text: Any, layers: Iterable[Any]) -> Iterator[None]:
    """Compute LoRA layers of a language model by joined matrices within the block, those that can be."""
    weights = JoinedWeights(_groups(text, [layer for layer in layers if _can_join(layer)]))
    torch.cuda.empty_cache()  # of the former weights, whose places are too small for joined ones; other runs may wait
    mlps = [module for module in text.modules() if is_gated(module) and weights.have_all(module)]
    methods = replaced((mlp, "forward", MethodType(mlp_forward, mlp)) for mlp in mlps)
    try:
        with methods, text.register_forward_pre_hook(weights.update):
            yield
    finally:
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
        like = self._copies[0][1]
        if addresses != self._addresses:
            fields = [
                (source.data_ptr(), target.data_ptr(), *source.shape, source.stride(0), target.stride(0))
                for source, target, _ in self._copies
            ]
            scales = [scale for *_, scale in self._copies]
            self._table = torch.tensor(fields, device=like.device), torch.tensor(scales, device=like.device)
            self._addresses = addresses
        scaled_copies(*self._table, like=like)

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
