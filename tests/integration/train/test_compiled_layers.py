"""Compiled layers take no number from the CPU: a float of a module is a constant of their graph, and not an input."""

from __future__ import annotations

import pytest
import torch

from lookonce.selftest.attention import Heads
from lookonce.selftest.model import ModelSize, small_model
from lookonce.selftest.passes import Passes
from lookonce.selftest.questions import Questions, make_batches
from lookonce.train.model.compile import training_on_packs

CPU = torch.device("cpu")
COMPILE = torch.nn.Module.compile


@pytest.mark.filterwarnings("default")  # the compiler warns
def test_floats_of_modules_are_constants_of_the_graph(monkeypatch):
    def keep(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        tensors.extend(node.meta["example_value"] for node in nodes)
        return graph.forward

    tensors: list[object] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **options: COMPILE(layer, backend=keep, **options))
    model = small_model(ModelSize(64, 2, Heads(4, 2, 16)), torch.float32, CPU)
    batches = make_batches(Questions(((3, 4), (2, 3)), (2, 2, 2), 256, 6), 64, CPU)
    passes = Passes(model, torch.float32, 256, CPU, flex=False)
    with training_on_packs(model, compiled=True):
        passes.outcome([batches.batch(next(iter(batches.sampler.epoch(0)))[0])])
    sizes = [tensor.dim() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    assert len(sizes) > 20 and 0 not in sizes
    assert not any(isinstance(tensor, (float, torch.SymFloat)) for tensor in tensors)
