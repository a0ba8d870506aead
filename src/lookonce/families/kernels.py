"""The kernels that transformers takes from other packages for linear attention, only where PyTorch would be too slow.

When its module of a family is imported, transformers looks for flash-linear-attention and causal-conv1d. It then calls
their kernels wherever they could be imported, and else its own functions of PyTorch. Two things follow. On a computer
without a GPU, such as the login node of a cluster, each call raises `0 active drivers`, as Triton's kernels need one.
And in float32 the kernels multiply in TensorFloat-32, which has 10 bits instead of 23.

Design: the functions of transformers' module are replaced, once, by ones that look at their first argument. The kernels
get tensors of 16 bits on a GPU; all others go to the functions of PyTorch. So a CPU works whatever is installed, and in
float32 packs, rows and `generate` stay equal to 1e-5. The cost is that float32 on a GPU is as slow as without kernels.
Where the package refuses gradients, training goes to PyTorch's functions too, and answers still to the kernels.

flash-linear-attention tries several forms of each kernel at its first call and keeps the fastest. One of the kernels
does so for each number of rows, which differs from pack to pack. So rows are given to it as one row of sequences.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache, lru_cache, wraps
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn.functional import embedding, pad

from lookonce.text import first_line

CHUNKED, RECURRENT, CONVOLUTION = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"
"""transformers' names of the rule over whole sequences, the rule token by token, and the convolution before either."""
REPLACED = (CHUNKED, RECURRENT, CONVOLUTION, "causal_conv1d_update")
PACKAGE, RULES = "fla", "fla.ops.gated_delta_rule"
"""flash-linear-attention, and its module that transformers takes kernels from."""


def without_kernels(*, backward: bool = False) -> str | None:
    """Why linear attention is slow on a GPU; None if the kernels can be imported, and have a `backward` pass.

    transformers names only one of the reasons, whatever the reason is: that the package is not installed.
    """
    if find_spec(PACKAGE) is None:
        reason = "flash-linear-attention is not installed: pip install 'lookonce[fla]'"
    else:
        try:
            importlib.import_module(RULES)
            if not (backward and _refuses_backward()):
                return None
            reason = (
                "flash-linear-attention has no backward pass for Hopper GPUs with Triton 3.4 to 3.7.0: pip install "
                "tilelang, or a PyTorch with a later Triton"
            )
        except Exception as error:  # of any kind, as transformers sees it
            reason = f"flash-linear-attention cannot be imported ({first_line(error)})"
    return f"PyTorch computes linear attention, in many small steps, because {reason}; docs/models.md#kernels"


def _refuses_backward() -> bool:
    """Whether the package's backward pass would raise an error, as these kernels gave wrong gradients.

    By the package's own rule: https://github.com/fla-org/flash-linear-attention/issues/640.
    """
    flags = vars(importlib.import_module(f"{PACKAGE}.utils"))
    is_wrong = flags.get("IS_NVIDIA_HOPPER") and flags.get("TRITON_ABOVE_3_4_0") and not flags.get("TRITON_ABOVE_3_7_1")
    return bool(is_wrong and (find_spec("tilelang") is None or not flags["has_usable_nvcc"]()))


@cache
def restrict_kernels(modeling: ModuleType) -> None:
    """Let the functions of transformers' module of a family take kernels for 16 bits on a GPU only."""
    for name in REPLACED:
        function = getattr(modeling, name, None)
        if isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
            setattr(modeling, name, _restricted(name, function, inspect.unwrap(function)))


def _restricted(name: str, chosen: Callable[..., Any], of_pytorch: Callable[..., Any]) -> Callable[..., Any]:
    """What transformers has `chosen` for tensors of 16 bits on a GPU, else the function `of_pytorch`."""
    rule = _rule_of_package() if name == CHUNKED else None
    kernel = in_one_row(rule) if rule else chosen
    trains = rule is None or without_kernels(backward=True) is None

    def fits(first: Any) -> bool:
        is_on_gpu = first.device.type != "cpu" and first.dtype.itemsize == 2
        return is_on_gpu and (trains or not torch.is_grad_enabled())

    @wraps(chosen)
    def restricted(first: Any, *args: Any, **options: Any) -> Any:
        return (kernel if fits(first) else of_pytorch)(first, *args, **options)

    restricted.takes_kernel = lambda first: rule is not None and fits(first)  # type: ignore[attr-defined]
    return restricted


def computed_by_pytorch(function: Any, first: torch.Tensor) -> bool:
    """Whether the rule over whole sequences, as transformers' module has it, goes to PyTorch's with this tensor."""
    return not (hasattr(function, "takes_kernel") and function.takes_kernel(first))


def _rule_of_package() -> Callable[..., Any] | None:
    """The package's rule over whole sequences; None without it, and then transformers has chosen PyTorch's."""
    if without_kernels():
        return None
    return getattr(importlib.import_module(RULES), "chunk_gated_delta_rule", None)


def in_one_row(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The package's rule, called with all rows as the sequences of one row; of `options` it gets those it knows."""
    known = inspect.signature(rule).parameters

    def run(*heads: Any, g: Any, beta: Any, cu_seqlens: Any = None, **options: Any) -> tuple[Any, Any]:
        options = {name: value for name, value in options.items() if name in known}
        rows, tokens = g.shape[:2]
        if rows == 1 or cu_seqlens is not None:
            read, states = rule(*heads, g=g, beta=beta, cu_seqlens=cu_seqlens, **options)
            return read, states
        *heads, g, beta = (tensor.flatten(0, 1)[None] for tensor in (*heads, g, beta))  # type: ignore[assignment]
        ends, ends_on_cpu = _ends(rows, tokens, g.device)
        read, states = rule(*heads, g=g, beta=beta, cu_seqlens=ends, cu_seqlens_cpu=ends_on_cpu, **options)
        return read[0].unflatten(0, (rows, tokens)), states

    return run


def in_rows(rule: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's rule, called with the sequences of one row as rows, which are as long as the longest of them."""

    def run(*heads: Any, g: Any, beta: Any, cu_seqlens: Any, cu_seqlens_cpu: Any, **options: Any) -> tuple[Any, Any]:
        tokens, places = _rows_of(cu_seqlens_cpu, g.device)
        flat = [pad(one[0].flatten(1), (0, 0, 0, 1)) for one in (*heads, g, beta)]  # no token changes a state
        embedded = (embedding(tokens, tensor, padding_idx=len(tensor) - 1) for tensor in flat)
        shapes = [(*tokens.shape, *tensor.shape[2:]) for tensor in (*heads, g, beta)]
        *rows, g, beta = (tensor.view(shape) for tensor, shape in zip(embedded, shapes, strict=True))
        read, states = rule(*rows, g=g, beta=beta, **options)
        return read.flatten(0, 1)[places][None], states

    return run


@lru_cache(maxsize=4)  # all layers of a pass ask for the same tensor, which is its own key
def _rows_of(ends: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of each row, then no token, `[N, longest]`; and the places of all tokens in it, end to end."""
    lengths = ends.diff()
    within = torch.arange(int(lengths.max()))
    is_token = within < lengths[:, None]
    tokens = torch.where(is_token, ends[:-1, None] + within, ends[-1])
    return tokens.to(device), is_token.flatten().nonzero()[:, 0].to(device)


@lru_cache(maxsize=4)  # all layers of a pass ask for the same, of which the package keeps what it computes
def _ends(rows: int, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each sequence begins and the last one ends, on the device and on the CPU."""
    ends = torch.arange(0, rows * tokens + 1, tokens)
    return ends.to(device), ends
