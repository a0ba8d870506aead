"""The self-test compares each variant once, and its parts in float32."""

from __future__ import annotations

import pytest

from lookonce.selftest import model
from lookonce.selftest.model import cpu_sizes, gpu_sizes
from lookonce.selftest.report import ON_CPU, ON_GPU, Check, Variant
from lookonce.text import quiet

PARTS = [("fp32", variant, True) for variant in ON_GPU if not variant.compiled]


@pytest.mark.parametrize(
    ("sizes", "variants", "expected"),
    [
        (gpu_sizes(), ON_GPU, [*PARTS, *(("bf16", one, False) for one in ON_GPU)]),
        (gpu_sizes("fp32"), [Variant()], [("fp32", Variant(), False)]),
        (cpu_sizes(), ON_CPU, [(name, one, name == "fp32") for name in ("fp32", "bf16") for one in ON_CPU]),
    ],
)
def test_all_ways_are_compared_once_and_parts_in_float32(monkeypatch, sizes, variants, expected):
    class Checks:
        def __init__(self, size, questions, dtype, name, device):
            self.name = name

        def checks(self, variant):
            return [Check(self.name, 0.0, 0.1, variant)]

        def masks(self):
            return [Check("masks", 0, 0)]

        def attention(self):
            return [Check(f"attention, {self.name}", 0, 0)]

    monkeypatch.setattr(model, "ModelChecks", Checks)
    checks = model.compared(sizes, variants, quiet)
    assert [check.what for check in checks if check.variant is None] == [
        "masks",
        *(f"attention, {name}" for name in sizes[1]),
    ]
    assert [(check.what, check.variant, check.is_part) for check in checks if check.variant] == expected
