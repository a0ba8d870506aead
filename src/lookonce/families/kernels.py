"""The kernels that transformers takes from other packages for linear attention, only where PyTorch would be too slow.

When its module of a family is imported, transformers looks for flash-linear-attention and causal-conv1d. It then calls
their kernels wherever they could be imported, and else its own functions of PyTorch. Two things follow. On a computer
without a GPU, such as the login node of a cluster, each call raises `0 active drivers`, as Triton's kernels need one.
And in float32 the kernels multiply in TensorFloat-32, which has 10 bits instead of 23.

Design: the functions of transformers' module are replaced, once, by ones that look at their first argument. The kernels
get tensors of 16 bits on a GPU; all others go to the functions of PyTorch. So a CPU works whatever is installed, and in
float32 packs, rows and `generate` stay equal to 1e-5. The cost is that float32 on a GPU is as slow as without kernels.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

from lookonce.text import first_line

CHUNKED, RECURRENT, CONVOLUTION = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"
"""transformers' names of the rule over whole sequences, the rule token by token, and the convolution before either."""
REPLACED = (CHUNKED, RECURRENT, CONVOLUTION, "causal_conv1d_update")
PACKAGE, RULES = "fla", "fla.ops.gated_delta_rule"
"""flash-linear-attention, and its module that transformers takes kernels from."""


def without_kernels() -> str | None:
    """Why linear attention is slow on a GPU; None if the kernels can be imported.

    transformers names only one of the reasons, whatever the reason is: that the package is not installed.
    """
    if find_spec(PACKAGE) is None:
        reason = "flash-linear-attention is not installed: pip install 'lookonce[fla]'"
    else:
        try:
            importlib.import_module(RULES)
            return None
        except Exception as error:  # of any kind, as transformers sees it
            reason = f"flash-linear-attention cannot be imported ({first_line(error)})"
    return f"PyTorch computes linear attention, in many small steps, as {reason}; docs/models.md#kernels"


@cache
def restrict_kernels(modeling: ModuleType) -> None:
    """Let the functions of transformers' module of a family take kernels for 16 bits on a GPU only."""
    for name in REPLACED:
        function = getattr(modeling, name, None)
        if isinstance(function, FunctionType) and hasattr(function, "__wrapped__"):
            setattr(modeling, name, _restricted(function, inspect.unwrap(function)))


def _restricted(chosen: Callable[..., Any], of_pytorch: Callable[..., Any]) -> Callable[..., Any]:
    """What transformers has `chosen` for tensors of 16 bits on a GPU, else the function `of_pytorch`."""

    @wraps(chosen)
    def restricted(first: Any, *args: Any, **options: Any) -> Any:
        fits = first.device.type != "cpu" and first.dtype.itemsize == 2
        return (chosen if fits else of_pytorch)(first, *args, **options)

    return restricted
