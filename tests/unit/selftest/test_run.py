"""The self-test compares each variant once, and its parts in float32."""

from __future__ import annotations

import pytest
import torch

from lookonce.selftest import run
from lookonce.selftest.report import ON_CPU, ON_GPU, Check, Variant
from lookonce.selftest.run import Comparison, gpu_sizes
from lookonce.text import quiet


@pytest.fixture
def compared(monkeypatch):
    """Runs a comparison in which some variants are wrong, and gives what was compared, in order."""

    def compare(variants, precision="bf16"):
        class Checks:
            def __init__(self, size, questions, dtype, name, device):
                self.name = name

            def checks(self, variant):
                done.append((self.name, variant))
                return [Check("model", 0.0, 0.1, variant)]

        done: list[tuple[str, Variant]] = []
        monkeypatch.setattr(run, "ModelChecks", Checks)
        Comparison(gpu_sizes(precision), torch.device("cpu"), quiet).run(variants)
        return done

    monkeypatch.setattr(run, "mask_checks", lambda *arguments: [])
    monkeypatch.setattr(run, "attention_checks", lambda *arguments: [])
    return compare


def test_all_ways_are_compared_once_and_parts_in_float32(compared):
    done = compared(ON_GPU)
    assert [variant for name, variant in done if name == "bf16"] == list(ON_GPU)
    assert [variant for name, variant in done if name == "fp32"] == [
        variant for variant in ON_GPU if not variant.compiled
    ]


def test_without_a_gpu_dense_masks_are_compared(compared):
    assert {variant for _, variant in compared(ON_CPU)} == set(ON_CPU)


def test_in_float32_each_way_is_compared_itself(compared):
    assert compared([Variant()], precision="fp32") == [("fp32", Variant())]
