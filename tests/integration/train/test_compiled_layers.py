"""Compiled layers serve packs of all shapes, and take no number from the CPU: a float of a module is a constant."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.batches import packs_of
from support.models.adapted import Layer, adapted, assert_close, computed
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

from lookonce.selftest.model import Heads, ModelSize, Passes, Questions, small_model
from lookonce.train.model import attention, compile
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import fewer_passes, for_all_lengths, num_compiled_graphs, training_on_packs
from lookonce.train.model.load import text_model
from lookonce.train.model.loss import inputs_of
from lookonce.train.model.packs import packed_attention

CPU = torch.device("cpu")
COMPILE = torch.nn.Module.compile


def eager(layer: torch.nn.Module, **options: bool) -> None:
    COMPILE(layer, backend="eager", **options)


@pytest.mark.guarantee(
    "Packs of all lengths share one graph of compiled layers, in training too, where the first layer is one of them."
)
@pytest.mark.filterwarnings("default")  # the compiler warns
def test_packs_of_all_lengths_with_any_number_of_targets_share_their_graphs(monkeypatch):
    """A capture cannot compile: a shape that needs another graph ends the training."""
    monkeypatch.setattr(torch.nn.Module, "compile", eager)
    compiled = torch.compile(flex_attention, dynamic=True, backend="eager")
    monkeypatch.setattr(attention, "_compiled", lambda: compiled)
    model, mask = small_model(ModelSize(64, 5, Heads(4, 2, 16)), torch.float32, CPU), PackMask(1024, CPU)
    mask.is_dense = False  # blocks, as on a GPU
    num_graphs = []
    with training_on_packs(model, compiled=True):
        for length, num_targets in ((1024, 700), (256, 200), (1024, 1), (512, 2048), (640, 129), (256, 128)):
            seen_until = torch.full((length,), length, dtype=torch.int32)
            inputs = {"attention_mask": mask(seen_until), "position_ids": torch.arange(length).expand(3, 1, -1)}
            inputs |= inputs_of(model, mask, torch.arange(num_targets) % length, seen_until)
            del inputs["logits_to_keep"]
            with torch.no_grad():  # FlexAttention has no backward pass on a CPU
                text_model(model)(inputs_embeds=torch.randn(1, length, 64), use_cache=False, **inputs)
            num_graphs.append(num_compiled_graphs())
    assert num_graphs[0] > 0 and len(set(num_graphs)) == 1


@pytest.mark.guarantee(
    "Packs of all lengths share one graph of compiled layers, in training too, where the first layer is one of them."
)
@pytest.mark.filterwarnings("default")  # the compiler warns
def test_in_training_all_layers_share_one_graph(monkeypatch):
    """A second one would take as long to compile as the first: the first layer's input must have a gradient too."""
    monkeypatch.setattr(torch.nn.Module, "compile", eager)
    model = small_model(ModelSize(64, 5, Heads(4, 2, 16)), torch.float32, CPU)
    passes, before = Passes(model, torch.float32, CPU), num_compiled_graphs()
    pack = packs_of(Questions(((3, 4), (2, 3)), (2, 2, 2), 256, 6), 64)[:1]
    with packed_attention(model):
        expected = passes.outcome(pack)
    with packed_attention(model, compiled=True):
        assert max(passes.outcome(pack).distance(expected)) < 1e-6
        assert num_compiled_graphs() == before + 1
        assert max(passes.outcome(pack).distance(expected)) < 1e-6


@pytest.mark.filterwarnings("default")  # the compiler warns
def test_a_later_model_of_the_same_shape_uses_the_code_of_an_earlier_one_which_is_freed(monkeypatch):
    """A process that trains several runs compiles once, and its compiled code holds no weights."""
    monkeypatch.setattr(torch.nn.Module, "compile", eager)
    pack = packs_of(Questions(((3, 4), (2, 3)), (2, 2, 2), 256, 6), 64)[:1]

    def compiled() -> tuple[int, list[weakref.ref]]:
        model, before = small_model(ModelSize(64, 5, Heads(4, 2, 16)), torch.float32, CPU), num_compiled_graphs()
        with packed_attention(model, compiled=True):
            Passes(model, torch.float32, CPU).outcome(pack)
        kept = [*model.parameters(), *text_model(model).layers]
        return num_compiled_graphs() - before, [weakref.ref(one) for one in kept]

    torch._dynamo.reset()
    for num_graphs in (1, 0):
        new, references = compiled()
        gc.collect()
        assert new == num_graphs and not any(reference() is not None for reference in references)


@pytest.mark.filterwarnings("default")  # the compiler warns
def test_floats_of_modules_are_constants_of_the_graph(monkeypatch):
    def keep(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        tensors.extend(node.meta["example_value"] for node in nodes)
        return graph.forward

    tensors: list[object] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **options: COMPILE(layer, backend=keep, **options))
    model = small_model(ModelSize(64, 2, Heads(4, 2, 16)), torch.float32, CPU)
    passes, packs = Passes(model, torch.float32, CPU), packs_of(Questions(((3, 4), (2, 3)), (2, 2, 2), 256, 6), 64)
    with packed_attention(model, compiled=True):
        passes.outcome(packs[:1])
    sizes = [tensor.dim() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    assert len(sizes) > 20 and 0 not in sizes
    assert not any(isinstance(tensor, (float, torch.SymFloat)) for tensor in tensors)


def test_joined_matrices_in_one_graph_of_all_layers_and_lengths_compute_what_peft_computes(monkeypatch):
    monkeypatch.setattr(compile, "text_model", lambda model: model)
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
