"""A stand-in for flash-linear-attention: the functions that transformers takes from it, as PyTorch computes them.

They have the names and the order of arguments of version 0.6, and refuse what its kernels refuse or would read wrongly.
So tests without a GPU see that calls keep to them. transformers' own decorator chooses them.
"""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.integrations import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_5 import modeling_qwen3_5

from lookonce.families.kernels import CHUNKED, RECURRENT, in_rows, restrict_kernels

NAMES = {CHUNKED: "chunk_gated_delta_rule", RECURRENT: "fused_recurrent_gated_delta_rule"}
"""transformers' name of each function, and that of the package."""
Result = tuple[torch.Tensor, torch.Tensor | None]


def take_stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let transformers' module of Qwen3.5 take the stand-in; returns the list of its calls so far."""
    restrict_kernels(modeling_qwen3_5)  # so that this is what a test leaves behind
    calls: list[str] = []
    of_pytorch = {name: inspect.unwrap(getattr(modeling_qwen3_5, name)) for name in NAMES}

    def chunk_gated_delta_rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Result:
        calls.append("chunk, state" if output_final_state else "chunk")
        assert scale is None and not kwargs
        check(q, k, v, g, beta, initial_state, cu_seqlens)
        options: dict[str, Any] = {"initial_state": initial_state, "output_final_state": output_final_state}
        options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
        if cu_seqlens is None:
            return of_pytorch[CHUNKED](q, k, v, g, beta, **options)
        ends = {"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu}
        return in_rows(of_pytorch[CHUNKED])(q, k, v, g=g, beta=beta, **ends, **options)

    def fused_recurrent_gated_delta_rule(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor | None = None,
        gk: torch.Tensor | None = None,
        gv: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Result:
        calls.append("recurrent")
        assert gk is gv is scale is cu_seqlens is None and not kwargs
        assert g is not None and beta is not None  # it would take 1 for them
        check(q, k, v, g, beta, initial_state)
        inputs = [one for one in (q, k, v, g, beta, initial_state) if one is not None]
        assert not (torch.is_grad_enabled() and any(one.requires_grad for one in inputs)), "it has no backward pass"
        options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        return of_pytorch[RECURRENT](q, k, v, g, beta, initial_state=initial_state, **options)

    package: Any = ModuleType("fla")
    package.__spec__ = ModuleSpec("fla", None)
    package.chunk_gated_delta_rule = chunk_gated_delta_rule
    package.fused_recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule
    monkeypatch.setitem(sys.modules, "fla", package)
    for name, function in of_pytorch.items():
        chosen = use_kernel_func_from_hub_with_fallback(NAMES[name], "fla")(function)
        chosen.takes_kernel = lambda first: True
        monkeypatch.setattr(modeling_qwen3_5, name, chosen)
    return calls


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    ends: torch.Tensor | None = None,
) -> None:
    """Shapes `[B, T, H, K]` of queries and keys, `[B, T, HV, V]` of values, `[B, T, HV]`, and `[B, HV, K, V]`.

    With `ends` of sequences there is one row, and a state for each of them.

    The decay and the state are float32; the package gives gradients of the latter in no other precision.
    """
    (rows, tokens, heads, size), value_heads = k.shape, v.shape[2]
    assert q.shape == k.shape and value_heads % heads == 0 and size <= 256
    assert v.shape[:2] == (rows, tokens) and g.shape == beta.shape == (rows, tokens, value_heads)
    assert q.dtype == k.dtype == v.dtype == beta.dtype and g.dtype == torch.float32
    sequences = rows if ends is None else len(ends) - 1
    assert ends is None or (rows == 1 and ends[0] == 0 and ends[-1] == tokens)
    if state is not None:
        assert state.shape == (sequences, value_heads, size, v.shape[3]) and state.dtype == torch.float32
