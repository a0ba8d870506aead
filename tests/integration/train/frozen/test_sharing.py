"""On the same quantised weights, a shared prefix gives the loss and the gradients of one pass per question."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import BatchMaker
from support.trainings import compile_layers_by, needs_bitsandbytes

from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.run.sections import BatchSection
from lookonce.selftest.model import Outcome, Passes
from lookonce.train.model.frozen import Fp8Linear
from lookonce.train.model.load import load_trained, load_without_tower
from lookonce.train.model.packs import packed_attention
from lookonce.workflow import train

QUANTISED = [pytest.param(kind, marks=needs_bitsandbytes) for kind in ("nf4", "int8")]
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="quantised weights are loaded onto the GPU")

CPU = torch.device("cpu")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def session(sample: Path, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    data = {"train": str(sample / "test.jsonl"), "val": [], "test": []}
    inputs = open_run(make_run_in(tmp_path_factory.mktemp("frozen"), data=data, cache={"min_pixels": 1}), TO_BUILD)
    inputs.build()
    return inputs


class Steps:
    """The steps of an epoch, each with the same adapter on the same quantised weights."""

    def __init__(self, session: OpenRun, random_lora: Callable[..., Any], frozen: str) -> None:
        self.session, self.examples = session, session.examples("train")[0]
        model = random_lora(session, partial(load_without_tower, frozen=frozen)).train()
        self.passes = Passes(model, torch.float32, CPU)

    def outcomes(self, *, compiled: bool = False, **batch: Any) -> list[Outcome]:
        options = BatchSection(samples_per_step=30, samples_per_forward=30, tokens_per_pack=2048, **batch)
        source, tokenizer = self.session.features, self.session.chat_tokenizer
        batches = BatchMaker.of(self.examples, tokenizer, source, options, CPU, seed=3)
        with packed_attention(self.passes.model, compiled=compiled):
            return [self.passes.outcome(map(batches.pack, step)) for step in batches.sampler.epoch(0)]


@ON_CPU
@pytest.mark.filterwarnings("default")  # the compiler warns
@pytest.mark.parametrize("frozen", ["fp8", *QUANTISED])
def test_compiled_layers_are_one_graph_and_give_the_same(session, random_lora, frozen, monkeypatch):
    steps = Steps(session, random_lora, frozen)
    steps.passes.model.eval()  # in which bitsandbytes computes int8 as on a GPU
    expected = steps.outcomes(mode="shared")
    compile_layers_by(monkeypatch, "eager", fullgraph=True)
    for found, launched in zip(steps.outcomes(compiled=True, mode="shared"), expected, strict=True):
        assert max(found.distance(launched)) < TOLERANCE


@ON_CPU
@pytest.mark.guarantee("On the same quantised weights, all batch modes have the same loss and gradients.")
@pytest.mark.parametrize("frozen", QUANTISED)
def test_all_batch_modes_give_the_same_loss_and_gradients(session, random_lora, frozen):
    steps = Steps(session, random_lora, frozen)
    separate = steps.outcomes(mode="separate")
    for mode in ("packed", "shared"):
        for found, expected in zip(steps.outcomes(mode=mode), separate, strict=True):
            assert max(found.distance(expected)) < TOLERANCE


@ON_CPU
@pytest.mark.guarantee("In fp8, batch modes differ by rounding alone.")
def test_with_fp8_the_batch_modes_differ_far_less_than_fp8_from_unrounded_weights(session, random_lora):
    """Inputs that differ in their last bit may be rounded to neighbouring values, so equal to 1e-5 they are not."""
    steps, unrounded = Steps(session, random_lora, "fp8"), Steps(session, random_lora, "precision")
    separate = steps.outcomes(mode="separate")
    rounding = [max(one.distance(other)) for one, other in zip(separate, unrounded.outcomes(), strict=True)]
    for mode in ("packed", "shared"):
        between = [max(one.distance(other)) for one, other in zip(steps.outcomes(mode=mode), separate, strict=True)]
        assert max(between) < min(rounding) / 5


def num_fp8(model: Any) -> int:
    return sum(isinstance(module, Fp8Linear) for module in model.modules())


@pytest.mark.guarantee("After training in fp8, answers are computed with unrounded weights.")
def test_a_run_on_fp8_is_answered_with_unrounded_weights(make_cached_run):
    run = make_cached_run(train={"steps": 3, "frozen": "fp8", "logging_steps": 1})
    train(run, notify=lambda note: None)
    assert (run.output / "predictions" / "val.jsonl").exists()
    inputs, adapter = open_run(run, TO_BUILD), run.output / "adapter"
    assert num_fp8(load_trained(inputs.model_folder, run, adapter)) == 0
    assert num_fp8(load_without_tower(inputs.model_folder, torch.float32, frozen="fp8")) > 0
