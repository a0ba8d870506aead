"""All questions about an image in one pass over its tokens: the same loss and gradients as each for itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.train.attention import PackMask
from lookonce.train.fast_layers import training_on_packs
from lookonce.train.feed import Feed
from lookonce.train.inputs import Inputs
from lookonce.train.loss import forward_loss
from lookonce.train.model import add_lora, load_without_tower
from lookonce.train.run import Session
from lookonce.train.run_file import BatchSection

TOLERANCE = 1e-5
SIZES = {"min_pixels": 1, "max_pixels": 120_000}


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
    by_image: dict[tuple[Path, ...], list[Record]] = {}
    for record in everything:
        by_image.setdefault(record.images, []).append(record)
    turns = [record.turns[0] for record in everything]
    rng = random.Random(0)
    groups = list(by_image.items())[:7]
    found = []
    for number, (images, of_image) in enumerate(groups):
        size = (1, 17, 9, 4, 12, 1, 6)[number]
        asked = [*of_image, *(Record(images, (rng.choice(turns),)) for _ in range(size))][:size]
        found += asked
    first, second = groups[0][0], groups[1][0]
    found += [Record(first, (turn,), system="Answer briefly.") for turn in turns[:3]]
    found += [Record(first, (turns[4], turns[5]))]
    found += [Record(first, (turns[4], turns[6]))]
    found += [Record((*second, *first), (turn,)) for turn in turns[:2]]
    found += [Record((), (Turn("Is there text?", "no"),)), Record((), (Turn("Is there text?", "yes"),))]
    found += [
        Record(first, (Turn("Which?", "this"),)),
        Record(first, (Turn("Which?", "that"),)),
    ]  # one prefix, two ends
    return found


@pytest.fixture(scope="module")
def make_session(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Session]:
    from lookonce.train.run_file import RunFile

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
    import shutil

    shutil.copytree(sample / "model", folder)
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = []
    (folder / "config.json").write_text(json.dumps(config))
    for path in folder.glob("*.safetensors"):
        tensors = {name: value for name, value in load_file(path).items() if "deepstack" not in name}
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def with_lora(session: Session) -> Any:
    inputs = session.inputs
    model = add_lora(load_without_tower(inputs.checkpoint, torch.float32), inputs.checkpoint, inputs.run.lora, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model


def steps(session: Session, **batch: Any) -> list[Step]:
    """All steps of an epoch, each from the same adapter."""
    model, options = with_lora(session), BatchSection(**batch)
    examples = session.examples("train")[0]
    feed = Feed.of(examples, session.prompter, session.collator.vision, options, torch.device("cpu"), seed=3)
    mask = PackMask(options.tokens_per_pack, torch.device("cpu"))
    found = []
    with training_on_packs(model, compiled=False):
        for forwards in feed.order.epoch(0):
            loss = sum(_backward(forward_loss(model, feed.batch(forward), mask)) for forward in forwards)
            gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
            model.zero_grad(set_to_none=True)
            found.append(Step(loss, gradients, len(forwards)))
    return found


def _backward(loss: torch.Tensor) -> float:
    loss.backward()
    return loss.item()


@pytest.fixture(scope="module")
def whole(make_session: Callable[..., Session]) -> Session:
    return make_session()


@pytest.mark.parametrize("loss", ["token", "sample"])
@pytest.mark.parametrize(
    "batch",
    [
        {"mode": "shared"},
        {"mode": "shared", "tokens_per_pack": 900},
        {"mode": "packed", "tokens_per_pack": 2000},
        {"mode": "separate", "samples_per_forward": 3},
    ],
)
def test_a_step_is_the_same_however_it_goes_through_the_model(whole, batch, loss):
    num_samples = len(whole.examples("train")[0])
    common = {"samples_per_step": num_samples, "loss": loss}
    [expected] = steps(whole, mode="separate", samples_per_forward=num_samples, **common)
    [found] = steps(whole, **common, **batch)
    assert found.num_forwards == 1 or batch != {"mode": "shared"}
    assert_same(found, expected)


@pytest.mark.parametrize("questions_per_image", [None, 1, 4])
def test_all_modes_train_on_the_same_steps(whole, questions_per_image):
    common = {"samples_per_step": 16, "questions_per_image": questions_per_image}
    expected = steps(whole, mode="separate", **common)
    assert len(expected) == 4
    for mode in ("shared", "packed"):
        for found, right in zip(steps(whole, mode=mode, tokens_per_pack=1000, **common), expected, strict=True):
            assert_same(found, right)


def test_it_holds_for_a_model_without_deepstack(make_session, without_levels):
    session = make_session(without_levels)
    assert session.cache.fingerprint.num_levels == 1
    [expected] = steps(session, mode="separate", samples_per_step=1000)
    [found] = steps(session, mode="shared", samples_per_step=1000)
    assert_same(found, expected)


def test_a_pack_may_be_full_to_the_last_token(whole):
    examples = whole.examples("train")[0]
    order = Feed.of(
        examples, whole.prompter, whole.collator.vision, BatchSection(samples_per_step=1000), torch.device("cpu"), 3
    ).order
    [length] = order.lengths(0)
    [expected] = steps(whole, mode="separate", samples_per_step=1000)
    [found] = steps(whole, mode="shared", samples_per_step=1000, tokens_per_pack=length)
    assert found.num_forwards == 1
    assert_same(found, expected)
    assert [step.num_forwards for step in steps(whole, samples_per_step=1000, tokens_per_pack=length - 1)] == [2]


def test_the_images_of_a_pack_are_shown_once(whole):
    examples = whole.examples("train")[0]
    options = BatchSection(samples_per_step=1000)
    feed = Feed.of(examples, whole.prompter, whole.collator.vision, options, torch.device("cpu"), 3)
    [[forward]] = feed.order.epoch(0)
    shared = feed.batch(forward)
    num_groups = len({(e.image_keys, e.token_ids[:20].tobytes()) for e in examples if e.image_keys})
    assert len(shared["image_grid_thw"]) <= num_groups + 5 < len(examples) / 3
    assert shared["input_ids"].shape[1] < 0.5 * sum(example.num_tokens for example in examples)
