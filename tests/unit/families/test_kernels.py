"""Kernels of other packages get 16 bits on a GPU alone, whatever is installed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial, wraps
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.models.flash_linear_attention import take_stand_in
from transformers.models.qwen3_5 import modeling_qwen3_5

from lookonce.families import kernels
from lookonce.families.kernels import (
    CHUNKED,
    PACKAGE,
    REPLACED,
    computed_by_pytorch,
    in_one_row,
    restrict_kernels,
    without_kernels,
)


@pytest.fixture
def modeling() -> Any:
    """A module whose functions were decorated as transformers' are."""
    module: Any = ModuleType("modeling_of_a_test")
    for name in REPLACED:

        def of_pytorch(first: Any, second: str = "", *, third: str = "", **options: Any) -> tuple[str, str, str]:
            return "PyTorch", second, third

        @wraps(of_pytorch)
        def chosen(first: torch.Tensor, second: str = "", *, third: str = "") -> tuple[str, str, str]:
            return "kernel", second, third

        setattr(module, name, chosen)
    return module


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("meta", torch.bfloat16, "kernel"),  # no test without a GPU can have a tensor there
        ("meta", torch.float16, "kernel"),
        ("meta", torch.float32, "PyTorch"),
        ("meta", torch.float64, "PyTorch"),
        ("cpu", torch.bfloat16, "PyTorch"),
        ("cpu", torch.float32, "PyTorch"),
    ],
)
def test_only_16_bits_on_a_gpu_go_to_kernels(modeling, device, dtype, expected):
    first = torch.empty(1, dtype=dtype, device=device)
    for _ in range(2):  # again for each model that is loaded
        restrict_kernels(modeling)
        for name in REPLACED:
            assert getattr(modeling, name)(first, "second", third="third") == (expected, "second", "third")


def test_a_module_without_linear_attention_stays_as_it_is():
    module: Any = ModuleType("another_modeling_of_a_test")
    module.causal_conv1d_fn = print  # nothing was chosen here
    restrict_kernels(module)
    assert {name for name in vars(module) if not name.startswith("__")} == {"causal_conv1d_fn"}
    assert module.causal_conv1d_fn is print


@pytest.fixture
def installed(monkeypatch, tmp_path) -> Path:
    """A folder that packages are imported from."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "find_spec", PathFinder.find_spec)
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert without_kernels() == (
        "PyTorch computes linear attention, in many small steps, because flash-linear-attention is not installed: pip "
        "install 'lookonce[fla]'; docs/models.md#kernels"
    )


def test_a_package_that_cannot_be_imported_is_named_with_the_reason(installed):
    (installed / PACKAGE).mkdir()
    (installed / PACKAGE / "__init__.py").write_text('raise RuntimeError("0 active drivers\\nmore")')
    assert "flash-linear-attention cannot be imported (0 active drivers); docs" in (without_kernels() or "")


@pytest.fixture
def package(installed) -> Iterator[Path]:
    """A package that can be imported, whose rule answers with a word."""
    folder = installed / PACKAGE / "ops"
    folder.mkdir(parents=True)
    for path in (installed / PACKAGE / "__init__.py", folder / "__init__.py"):
        path.touch()
    (folder / "gated_delta_rule.py").write_text("def chunk_gated_delta_rule(q, **options): return 'kernel', None")
    yield installed
    for name in [name for name in sys.modules if name.split(".")[0] in (PACKAGE, "tilelang")]:
        del sys.modules[name]


def of_gpu(hopper: bool, triton_3_4: bool, triton_3_7_1: bool, nvcc: bool) -> str:
    """What the package knows of a GPU."""
    known = {"IS_NVIDIA_HOPPER": hopper, "TRITON_ABOVE_3_4_0": triton_3_4, "TRITON_ABOVE_3_7_1": triton_3_7_1}
    return "\n".join(f"{name} = {value}" for name, value in known.items()) + f"\ndef has_usable_nvcc(): return {nvcc}"


@pytest.mark.parametrize(
    ("known", "tilelang", "refuses"),
    [
        (of_gpu(True, True, False, True), False, True),
        (of_gpu(True, True, False, True), True, False),
        (of_gpu(True, True, False, False), True, True),
        (of_gpu(True, True, True, True), False, False),
        (of_gpu(True, False, False, True), False, False),
        (of_gpu(False, True, False, True), False, False),
        ("", False, False),  # another version, which may have dropped its rule
    ],
)
def test_a_backward_pass_that_the_package_refuses_is_named_and_left_to_pytorch(
    package, modeling, known, tilelang, refuses
):
    (package / PACKAGE / "utils.py").write_text(known)
    if tilelang:
        (package / "tilelang.py").touch()
    reason = without_kernels(backward=True)
    assert without_kernels() is None
    assert ("no backward pass for Hopper GPUs with Triton 3.4 to 3.7.0: pip" in reason) if refuses else reason is None
    restrict_kernels(modeling)
    row = torch.empty(1, 3, 2, dtype=torch.bfloat16, device="meta")
    call = partial(getattr(modeling, CHUNKED), row, g=row, beta=row)
    with torch.no_grad():
        assert call()[0] == "kernel"
    assert call()[0] == ("PyTorch" if refuses else "kernel")
    assert computed_by_pytorch(getattr(modeling, CHUNKED), row) == refuses


def test_the_rule_is_that_of_pytorch_on_a_cpu_where_transformers_has_taken_a_kernel(monkeypatch):
    calls = take_stand_in(monkeypatch)
    heads, decay = torch.ones(1, 3, 2, 4), torch.zeros(1, 3, 2)

    def run() -> Any:
        return getattr(modeling_qwen3_5, CHUNKED)(heads, heads, heads, g=decay, beta=decay)[0]

    expected = run()
    assert calls == ["chunk"]
    restrict_kernels.__wrapped__(modeling_qwen3_5)  # as for a module that was just imported
    assert torch.equal(run(), expected) and calls == ["chunk"]


@pytest.mark.guarantee(
    "Rows that are passed to a kernel as one row, and sequences that are passed to PyTorch as rows, have the "
    "results, states and gradients that each has by itself."
)
def test_rows_are_given_to_the_package_as_the_sequences_of_one_row():
    of_pytorch = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    calls: list[list[int]] = []

    def rule(*heads: Any, g: Any, beta: Any, initial_state: Any, cu_seqlens: Any, cu_seqlens_cpu: Any) -> Any:
        assert all(len(one) == 1 for one in (*heads, g, beta)) and torch.equal(cu_seqlens, cu_seqlens_cpu)
        calls.append(ends := cu_seqlens.tolist())
        results = [
            of_pytorch(
                *(one[:, begin:end] for one in heads),
                g=g[:, begin:end],
                beta=beta[:, begin:end],
                initial_state=initial_state[row, None],
                output_final_state=True,
            )
            for row, (begin, end) in enumerate(pairwise(ends))
        ]
        read, states = zip(*results, strict=True)
        return torch.cat(read, 1), torch.cat(states)

    drawn = torch.Generator().manual_seed(0)
    heads = [torch.randn(3, 70, 2, 4, generator=drawn, dtype=torch.float64) for _ in range(3)]
    decay, beta = -torch.rand(3, 70, 2, generator=drawn), torch.rand(3, 70, 2, generator=drawn)
    states = torch.randn(3, 2, 4, 4, generator=drawn)
    inputs = [one.requires_grad_() for one in (*heads, decay, beta, states)]
    options: dict[str, Any] = {"g": decay, "beta": beta, "initial_state": states}
    found = in_one_row(rule)(*heads, **options, position_ids="of the stock layer")
    expected = of_pytorch(*heads, **options, output_final_state=True)
    wanted = [torch.randn(one.shape, generator=drawn) for one in expected]
    gradients = [
        torch.autograd.grad([(one * other).sum() for one, other in zip(results, wanted, strict=True)], inputs)
        for results in (found, expected)
    ]
    torch.testing.assert_close([*found, *gradients[0]], [*expected, *gradients[1]])
    assert calls == [[0, 70, 140, 210]]


def test_one_row_and_sequences_of_the_caller_stay_as_they_are():
    def rule(*heads: Any, cu_seqlens: Any, **options: Any) -> Any:
        return heads, cu_seqlens

    [row, rows] = torch.zeros(1, 6, 2, 4), torch.zeros(2, 3, 2, 4)
    assert in_one_row(rule)(row, g=row, beta=row) == ((row,), None)
    assert in_one_row(rule)(rows, g=rows, beta=rows, cu_seqlens="ends") == ((rows,), "ends")
