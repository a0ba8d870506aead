"""The self-test compares each way once, and its parts in float32."""

from __future__ import annotations

import pytest
import torch

from lookonce.selftest import run
from lookonce.selftest.report import ON_CPU, ON_GPU, Check, Way
from lookonce.selftest.run import Comparison, gpu_sizes
from lookonce.text import quiet


@pytest.fixture
def compared(monkeypatch):
    """Runs a comparison in which some ways are wrong, and gives what was compared, in order."""

    def compare(ways, precision="bf16"):
        class Checks:
            def __init__(self, size, questions, dtype, name, device):
                self.name = name

            def checks(self, way):
                done.append((self.name, way))
                return [Check("model", 0.0, 0.1, way)]

        done: list[tuple[str, Way]] = []
        monkeypatch.setattr(run, "ModelChecks", Checks)
        Comparison(gpu_sizes(precision), torch.device("cpu"), quiet).run(ways)
        return done

    monkeypatch.setattr(run, "mask_checks", lambda *arguments: [])
    monkeypatch.setattr(run, "attention_checks", lambda *arguments: [])
    return compare


def test_all_ways_are_compared_once_and_parts_in_float32(compared):
    done = compared(ON_GPU)
    assert [way for name, way in done if name == "bf16"] == list(ON_GPU)
    assert [way for name, way in done if name == "fp32"] == [way for way in ON_GPU if not way.compiled]


def test_without_a_gpu_dense_masks_are_compared(compared):
    assert {way for _, way in compared(ON_CPU)} == set(ON_CPU)


def test_in_float32_each_way_is_compared_itself(compared):
    assert compared([Way()], precision="fp32") == [("fp32", Way())]
