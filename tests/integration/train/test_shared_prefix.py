"""One pass over an image for all its questions gives the same loss and gradients as one pass per question."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import BatchMaker
from support.trainings import SIZES, Step, assert_same, step

from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.run.config import RunFile
from lookonce.run.open import FROM_CACHE, TO_BUILD, OpenRun, open_run
from lookonce.run.sections import BatchSection
from lookonce.workflow import train

pytestmark = pytest.mark.guarantee(
    "Questions that share one pass over their image have the same loss and gradients of everything trained as "
    "separate samples, to 1e-5 relative in float32: for images of different sizes, 1 to 17 questions each, "
    "several turns, a system text, several images, with and without DeepStack, cut into packs in any way."
)

CPU = torch.device("cpu")
ALL = 1000
"""A number of samples a step that is larger than the dataset."""


def records(sample: Path) -> list[Record]:
    """Images of several sizes with 1 to 17 questions, a system text, several turns, two images, and no image."""
    everything = read_records(sample / "train.jsonl")
    turns = [record.turns[0] for record in everything]
    images = list(dict.fromkeys(record.images for record in everything))
    rng, found = random.Random(0), []
    for shown, num_questions in zip(images, (1, 17, 4), strict=False):
        chosen = rng.sample(turns, num_questions)
        found += [Record(shown, (turn,), metadata={"stage": number % 3}) for number, turn in enumerate(chosen)]
    first, second = images[:2]
    found += [Record(first, (turn,), system="Answer briefly.") for turn in turns[:3]]
    found += [Record(first, (turns[4], turns[5])), Record(first, (turns[4], turns[6]))]
    found += [Record((*second, *first), (turn,)) for turn in turns[:2]]
    found += [Record((), (Turn("Is there text?", answer),)) for answer in ("no", "yes")]
    found += [Record(first, (Turn("Which?", answer),)) for answer in ("this", "that")]  # one question, two answers
    return found


@pytest.fixture(scope="module")
def make_session(
    sample: Path, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., OpenRun]:
    folder = tmp_path_factory.mktemp("shared")
    write_records(folder / "records.jsonl", records(sample), image_root=sample)

    def make(**changes: Any) -> OpenRun:
        data = {"train": str(folder / "records.jsonl"), "val": [], "test": [], "image_root": str(sample)} | changes
        lora = {"modules_to_save": ["embed_tokens"]}
        inputs = open_run(make_run_in(folder, data=data, cache=SIZES, lora=lora), TO_BUILD)
        inputs.build()
        return open_run(inputs.run, FROM_CACHE)

    return make


class Bench:
    """A model whose weights never change, and the losses and gradients of its steps."""

    def __init__(self, session: OpenRun, model: Any) -> None:
        self.session, self.model, self.examples = session, model, session.examples("train")[0]
        self.expected = cache(self.separate)

    def batch_maker(self, **batch: Any) -> BatchMaker:
        session, options = self.session, BatchSection(**batch)
        return BatchMaker.of(self.examples, session.chat_tokenizer, session.features, options, CPU, seed=3)

    def separate(self, **batch: Any) -> list[Step]:
        """Steps in which every question is a padded row."""
        return self.steps(self.batch_maker(mode="separate", samples_per_forward=ALL, **batch))

    def steps(self, maker: BatchMaker) -> list[Step]:
        """All steps of an epoch, each with the same adapter."""
        return [step(self.model, [*map(maker.batch, micro_batches)]) for micro_batches in maker.sampler.epoch(0)]


@pytest.fixture(scope="module")
def bench(make_session: Callable[..., OpenRun], random_lora: Callable[..., Any]) -> Bench:
    session = make_session()
    return Bench(session, random_lora(session))


@pytest.mark.guarantee("A step that is cut into several forward passes has the gradient of the whole step.")
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
def test_a_step_is_the_same_in_every_mode(bench, batch, loss):
    assert len({bench.session.cache.grid_thw(key) for example in bench.examples for key in example.image_keys}) >= 3
    [expected] = bench.expected(samples_per_step=ALL, loss=loss)
    maker = bench.batch_maker(samples_per_step=ALL, loss=loss, **batch)
    [micro_batches], [found] = maker.sampler.epoch(0), bench.steps(maker)
    assert (len(micro_batches) == 1) == (batch == {"mode": "shared"})
    assert_same(found, expected)


@pytest.mark.parametrize("questions_per_image", [None, 1, 4])
def test_all_modes_train_on_the_same_steps(bench, questions_per_image):
    common = {"samples_per_step": 12, "questions_per_image": questions_per_image}
    expected = bench.expected(**common)
    assert len(expected) == 3
    for mode in ("shared", "packed"):
        found = bench.steps(bench.batch_maker(mode=mode, tokens_per_pack=1000, **common))
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("form", ["summary", "turns"])
def test_prefixes_of_several_levels_are_exact(make_session, random_lora, form):
    """An image, then answers of stage 0, then of stage 1, then a question of stage 2."""
    session = make_session(context={"by": "stage", "order": [0, 1, 2], "form": form})
    bench = Bench(session, random_lora(session))
    batch_maker = bench.batch_maker(samples_per_step=ALL)
    [shared] = [group.shared_tokens for group in batch_maker.sampler.groups if len(group.examples) > 10]
    assert len({number for number in shared if number > 20}) > 1
    assert sum(batch_maker.sampler.pack_lengths(0)) < 0.3 * sum(example.num_tokens for example in bench.examples)
    [found] = bench.steps(batch_maker)
    assert_same(found, bench.expected(samples_per_step=ALL, loss="token")[0])


def test_padded_rows_do_not_use_the_attention_of_packs(make_cached_run, monkeypatch):
    """So models for which packs are refused can be trained in `separate`."""

    @contextmanager
    def refused(*_: Any, **__: Any) -> Iterator[None]:
        yield pytest.fail("it was used")

    monkeypatch.setattr("lookonce.train.loop.trainer.packed_attention", refused)
    run = make_cached_run(batch={"mode": "separate"}, train={"steps": 1})
    assert train(run, notify=lambda note: None).num_steps == 1
