"""All questions about an image in one pass over its tokens: the same loss and gradients as each for itself."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.run.config import BatchSection, RunFile
from lookonce.run.inputs import Inputs
from lookonce.train.data.batches import Feed
from lookonce.train.data.packing import BLOCK
from lookonce.train.loop.session import Session
from lookonce.train.loop.trainer import CHECKPOINTING
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.load import add_lora, load_without_tower
from lookonce.train.model.loss import forward_loss
from lookonce.workflow.train import train

TOLERANCE = 1e-5
SIZES = {"min_pixels": 1, "max_pixels": 120_000}
CPU = torch.device("cpu")
ALL = 1000
"""Samples a step: more than there are."""


@dataclass
class Step:
    """What an optimizer step comes to."""

    loss: float
    gradients: dict[str, torch.Tensor]
    num_forwards: int


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def assert_same(found: Step, expected: Step) -> None:
    assert abs(found.loss - expected.loss) < TOLERANCE * abs(expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.abs().max() > 0, name
        assert distance(found.gradients[name], gradient) < TOLERANCE, name


def records(sample: Path) -> list[Record]:
    """Images of several sizes with 1 to 17 questions, a system text, several turns, two images, and no image."""
    everything = read_records(sample / "train.jsonl")
    turns = [record.turns[0] for record in everything]
    images = list(dict.fromkeys(record.images for record in everything))
    rng, found = random.Random(0), []
    for shown, num_questions in zip(images, (1, 17, 4), strict=False):
        found += [Record(shown, (turn,)) for turn in rng.sample(turns, num_questions)]
    first, second = images[:2]
    found += [Record(first, (turn,), system="Answer briefly.") for turn in turns[:3]]
    found += [Record(first, (turns[4], turns[5])), Record(first, (turns[4], turns[6]))]
    found += [Record((*second, *first), (turn,)) for turn in turns[:2]]
    found += [Record((), (Turn("Is there text?", answer),)) for answer in ("no", "yes")]
    found += [Record(first, (Turn("Which?", answer),)) for answer in ("this", "that")]  # one prefix, two ends
    return found


@pytest.fixture(scope="module")
def make_session(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Session]:
    folder = tmp_path_factory.mktemp("shared")
    write_records(folder / "records.jsonl", records(sample), image_root=sample)

    def make(model: Path = sample / "model") -> Session:
        values = {
            "model": {"path": str(model)},
            "data": {"train": str(folder / "records.jsonl"), "image_root": str(sample)},
            "cache": {"dir": str(folder / "caches"), "dtype": "float32", **SIZES},
            "lora": {"rank": 4, "modules_to_save": ["embed_tokens"]},
            "output": "unused",
        }
        inputs = Inputs.open(RunFile.model_validate(values))
        inputs.build()
        return Session.open(inputs)

    return make


@pytest.fixture(scope="module")
def without_levels(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's model with no DeepStack, as Qwen3.5 has none."""
    folder = tmp_path_factory.mktemp("flat") / "model"
    shutil.copytree(sample / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = []
    (folder / "config.json").write_text(json.dumps(config))
    for path in folder.glob("*.safetensors"):
        tensors = {name: value for name, value in load_file(path).items() if "deepstack" not in name}
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def with_lora(session: Session) -> Any:
    """A model whose adapter does something: LoRA's B matrices start at zero."""
    inputs = session.inputs
    model = add_lora(
        load_without_tower(inputs.model_folder, torch.float32), inputs.model_folder, inputs.run.lora, seed=1
    )
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model


class Bench:
    """A model that is never changed, and what its steps come to."""

    def __init__(self, session: Session) -> None:
        self.session, self.model, self.examples = session, with_lora(session), session.examples("train")[0]
        self.expected = cache(self.separate)

    def feed(self, **batch: Any) -> Feed:
        session, options = self.session, BatchSection(**batch)
        return Feed.of(self.examples, session.prompter, session.collator.vision, options, CPU, seed=3)

    def separate(self, **batch: Any) -> list[Step]:
        """Every question for itself; remembered."""
        return self.steps(self.feed(mode="separate", samples_per_forward=ALL, **batch))

    def steps(self, feed: Feed) -> list[Step]:
        """All steps of an epoch, each from the same adapter."""
        mask, found = PackMask(feed.order.batch.tokens_per_pack, CPU), []
        with training_on_packs(self.model, compiled=False):
            for forwards in feed.order.epoch(0):
                loss = sum(_backward(forward_loss(self.model, feed.batch(forward), mask)) for forward in forwards)
                trained = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
                gradients = {name: weight.grad for name, weight in trained}
                self.model.zero_grad(set_to_none=True)
                found.append(Step(loss, gradients, len(forwards)))
        return found


def _backward(loss: torch.Tensor) -> float:
    loss.backward()
    return loss.item()


@pytest.fixture(scope="module")
def bench(make_session: Callable[..., Session]) -> Bench:
    return Bench(make_session())


@pytest.mark.parametrize("loss", ["token", "sample"])
@pytest.mark.parametrize(
    "batch",
    [
        {"mode": "shared"},
        {"mode": "shared", "tokens_per_pack": 600},
        {"mode": "packed", "tokens_per_pack": 2000},
        {"mode": "separate", "samples_per_forward": 3},
    ],
    ids=["shared", "shared in several packs", "packed", "separate"],
)
def test_a_step_is_the_same_however_it_goes_through_the_model(bench, batch, loss):
    assert len({bench.session.cache.grid_thw(key) for example in bench.examples for key in example.image_keys}) >= 3
    [expected] = bench.expected(samples_per_step=ALL, loss=loss)
    [found] = bench.steps(bench.feed(samples_per_step=ALL, loss=loss, **batch))
    assert (found.num_forwards == 1) == (batch == {"mode": "shared"})
    assert_same(found, expected)


@pytest.mark.parametrize("questions_per_image", [None, 1, 4])
def test_all_modes_train_on_the_same_steps(bench, questions_per_image):
    common = {"samples_per_step": 12, "questions_per_image": questions_per_image}
    expected = bench.expected(**common)
    assert len(expected) == 3
    for mode in ("shared", "packed"):
        found = bench.steps(bench.feed(mode=mode, tokens_per_pack=1000, **common))
        for step, right in zip(found, expected, strict=True):
            assert_same(step, right)


def test_it_holds_for_a_model_without_deepstack(make_session, without_levels):
    bench = Bench(make_session(without_levels))
    assert bench.session.cache.fingerprint.num_levels == 1
    [found] = bench.steps(bench.feed(samples_per_step=ALL))
    assert_same(found, bench.expected(samples_per_step=ALL)[0])


def test_a_pack_may_be_full_to_the_last_token(bench):
    [length] = bench.feed(samples_per_step=ALL).order.lengths(0)
    [found] = bench.steps(bench.feed(samples_per_step=ALL, tokens_per_pack=length))
    assert found.num_forwards == 1
    assert_same(found, bench.expected(samples_per_step=ALL, loss="token")[0])
    [step] = bench.feed(samples_per_step=ALL, tokens_per_pack=length - 1).order.epoch(0)
    assert len(step) == 2


def test_padding_a_pack_changes_nothing(bench):
    feed = bench.feed(samples_per_step=ALL, tokens_per_pack=1000)
    padded = replace(feed, in_blocks=True)
    [step] = feed.order.epoch(0)
    lengths = [padded.batch(forward)["input_ids"].shape[1] for forward in step]
    assert all(length % BLOCK == 0 for length in lengths) and lengths != feed.order.lengths(0)
    assert_same(bench.steps(padded)[0], bench.expected(samples_per_step=ALL, loss="token")[0])


def test_gradient_checkpointing_changes_nothing(bench):
    bench.model.train()  # else it has no effect
    getattr(bench.model, f"{CHECKPOINTING}_enable")()
    [found] = bench.steps(bench.feed(samples_per_step=ALL))
    getattr(bench.model, f"{CHECKPOINTING}_disable")()
    bench.model.eval()
    assert_same(found, bench.expected(samples_per_step=ALL, loss="token")[0])


def test_every_image_of_a_pack_is_shown_once_after_the_same_text(bench):
    [[forward]] = bench.feed(samples_per_step=ALL).order.epoch(0)
    batch = bench.feed(samples_per_step=ALL).batch(forward)
    key_of = bench.session.inputs.key_of
    begins = {(tuple(map(key_of, record.images)), record.system) for record in bench.session.inputs.records["train"]}
    assert len(batch["image_grid_thw"]) == sum(len(keys) for keys, _ in begins)
    assert batch["input_ids"].shape[1] < 0.5 * sum(example.num_tokens for example in bench.examples)


def test_padded_rows_need_no_attention_of_packs(make_run, monkeypatch):
    """So models that packs are refused for can be trained in `separate`."""
    monkeypatch.setattr("lookonce.train.train.training_on_packs", lambda *_, **__: pytest.fail("it was used"))
    run = make_run(batch={"mode": "separate"}, train={"steps": 1})
    Inputs.open(run).build()
    assert train(run, notify=lambda note: None).num_steps == 1
