"""Joined matrices of frozen weights and LoRA in compiled layers."""

from __future__ import annotations

import pytest
import torch
from support.models.adapted import Layer, adapted, assert_close, computed
from torch._dynamo.utils import counters

from lookonce.train.model import compile
from lookonce.train.model.compile import fewer_passes, for_all_lengths


@pytest.fixture(autouse=True)
def the_model_is_its_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "text_model", lambda model: model)


def test_one_graph_of_all_layers_and_lengths_computes_what_peft_computes():
    model = adapted(Layer(), Layer(), Layer())
    inputs = [torch.randn(1, length, 8) for length in (15, 8, 40)]
    expected = [computed(model, model, x) for x in inputs]
    counters.clear()
    with fewer_passes(model, joins=True), for_all_lengths():
        for layer in model.base_model.model:
            layer.compile(dynamic=True, backend="aot_eager", fullgraph=True)
        for x, wanted in zip(inputs, expected, strict=True):
            assert_close(computed(model, model, x), wanted, 1e-5)
        assert counters["stats"]["unique_graphs"] == 1
        assert all(layer.self_attn.k_proj.waiting is None for layer in model.base_model.model)
