"""Gradient checkpointing changes neither loss nor gradients: compiled, on quantised weights, with dropout, in runs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.batches import BatchMaker
from support.trainings import compile_layers_by, needs_bitsandbytes
from torch import nn

from lookonce.run.open import FROM_CACHE, open_run
from lookonce.run.sections import UNQUANTISED, BatchSection
from lookonce.selftest.model import Passes
from lookonce.train.model.compile import checkpointed
from lookonce.train.model.load import load_without_tower
from lookonce.train.model.packs import packed_attention
from lookonce.workflow import train

CPU = torch.device("cpu")
COMPILED = [(UNQUANTISED, True), pytest.param("nf4", "selective", marks=needs_bitsandbytes)]
"""Kinds of frozen weights and forms of checkpointing."""


@pytest.mark.guarantee("Compiled layers with gradient checkpointing stay one graph, on quantised weights too.")
@pytest.mark.filterwarnings("default")  # the compiler warns
@pytest.mark.skipif(torch.cuda.is_available(), reason="quantised weights are loaded onto the GPU")
@pytest.mark.parametrize(("frozen", "how"), COMPILED)
def test_compiled_layers_stay_one_graph_and_give_the_same(make_cached_run, random_lora, frozen, how, monkeypatch):
    compile_layers_by(monkeypatch, "aot_eager", dynamic=None, fullgraph=True)  # for one length, which compiles sooner
    session = open_run(make_cached_run(), FROM_CACHE)
    model = random_lora(session, partial(load_without_tower, frozen=frozen)).train()
    passes, options = Passes(model, torch.float32, CPU), BatchSection(samples_per_step=4, tokens_per_pack=512)
    source, tokenizer = session.features, session.chat_tokenizer
    batches = BatchMaker.of(session.examples("train")[0], tokenizer, source, options, CPU, seed=3)
    pack = batches.pack(next(batches.sampler.epoch(0))[0])
    with packed_attention(model, compiled=False):
        expected = passes.outcome([pack])
    with packed_attention(model, compiled=True), checkpointed(model, how):
        assert max(passes.outcome([pack]).distance(expected)) < 1e-5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.5), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


@pytest.mark.filterwarnings("default")
def test_the_compiler_draws_the_same_dropout_again():
    torch.manual_seed(0)
    layers, x = nn.ModuleList([Layer(), Layer()]), torch.randn(5, 8)
    model = SimpleNamespace(model=SimpleNamespace(language_model=SimpleNamespace(layers=layers)))

    def gradients(how: Any) -> tuple[torch.Tensor, ...]:
        with checkpointed(model, how):
            first = torch.compile(layers[0].forward, dynamic=True, backend="aot_eager_decomp_partition")
            torch.manual_seed(1)
            return torch.autograd.grad(layers[1](first(x)).square().sum(), list(layers.parameters()))

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-6, atol=1e-6)


def test_a_run_ends_with_the_same_adapter(make_cached_run, tmp_path):
    adapters = []
    for choice in (False, "selective"):
        options = {"steps": 2, "gradient_checkpointing": choice}
        batch = {"samples_per_step": 4, "tokens_per_pack": 512}
        run = make_cached_run(
            output=str(tmp_path / f"{choice}"), train=options, batch=batch, lora={"dropout": 0.1}, data={"val": []}
        )
        train(run, notify=lambda note: None)
        adapters.append(load_file(run.output / "adapter" / "adapter_model.safetensors"))
    assert all(torch.equal(adapters[1][name], weight) for name, weight in adapters[0].items())
