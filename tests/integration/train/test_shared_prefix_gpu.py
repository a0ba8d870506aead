"""On a GPU, with FlexAttention and compilation, a shared prefix is as exact as one pass per question.

In bfloat16 no two computations are equal, so there are two yardsticks, over many different packs: the distance between
two computations of each question alone, and the distance of bfloat16 from float32. One of the two computations is
compiled, as sharing is: the compiler keeps float32 where transformers rounds, which makes most of the distance. There
are many packs because PyTorch has given wrong results beyond its limit of recompilations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from support.batches import BatchMaker, Replays, flat
from support.trainings import COMPILED_ON_GPU

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.run.sections import BatchSection
from lookonce.selftest.model import Outcome, Passes, stock_rows
from lookonce.train.data.packing import Pack, padded_length
from lookonce.train.data.sampler import MicroBatch, Sampler
from lookonce.train.model.compile import num_compiled_graphs
from lookonce.train.model.load import PRECISIONS, load_without_tower
from lookonce.train.model.packs import packed_attention

pytestmark = COMPILED_ON_GPU

DEVICE = torch.device("cuda")
NUM_PACKS = 56
LIMITS = (512, 1024, 1536, 2048)
"""Values of `tokens_per_pack`."""
NUM_ROWS = 8
"""Rows in a forward pass where each question is a padded row."""


@pytest.fixture(scope="module")
def sessions(
    sample: Path, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory
) -> list[OpenRun]:
    """Two sessions with the same model and questions: images of up to one block of tokens, and of more than two."""
    folder = tmp_path_factory.mktemp("caches")

    def make(**sizes: int) -> OpenRun:
        data = {"train": str(sample / "train.jsonl"), "val": [], "test": []}
        inputs = open_run(make_run_in(folder, data=data, cache={"dtype": "bfloat16"} | sizes), TO_BUILD)
        inputs.build()
        return inputs

    return [make(min_pixels=1, max_pixels=120_000), make(min_pixels=300_000, max_pixels=400_000)]


@pytest.fixture(scope="module")
def session(sessions: list[OpenRun]) -> OpenRun:
    return sessions[0]


def packs(sessions: list[OpenRun]) -> Iterator[tuple[BatchMaker, MicroBatch]]:
    """Random packs: few and many questions, few and many images, small and large, from nearly empty to full."""
    rng = random.Random(0)
    of_sessions = [(session, session.examples("train")[0]) for session in sessions]
    for seed, (session, examples) in zip(count(), cycle(of_sessions), strict=False):
        options = BatchSection(
            samples_per_step=rng.choice([2, 12, 30, 60]),
            questions_per_image=rng.choice([None, 1, 4]),
            tokens_per_pack=rng.choice(LIMITS),
        )
        sampler = Sampler.of(examples, session.chat_tokenizer.image_token_id, options, seed)
        batch_maker = BatchMaker(sampler, session.chat_tokenizer, session.features, DEVICE, pads=True)
        yield batch_maker, rng.choice(next(sampler.epoch(0)))


def load_rounded(model_folder: ModelFolder, dtype: torch.dtype) -> Any:
    """Load the model with the weights of bfloat16, so that both precisions have the same weights."""
    return load_without_tower(model_folder, torch.bfloat16).to(dtype)


class Computation(Passes):
    """Computes packs in one precision: bfloat16 as in training, or float32."""

    def __init__(self, session: OpenRun, precision: str, random_lora: Callable[..., Any]) -> None:
        dtype = PRECISIONS[precision]
        super().__init__(random_lora(session, load_rounded, dtype).to(DEVICE), dtype, DEVICE)

    def shared(self, batch_maker: BatchMaker, micro_batch: MicroBatch) -> Outcome:
        """The pack as in training."""
        return self._compiled([batch_maker.pack(micro_batch)])

    def alone(self, batch_maker: BatchMaker, micro_batch: MicroBatch) -> Outcome:
        """Each question in its own pack, also compiled."""
        groups = [group.subset([row]) for group in micro_batch.pack.groups for row in range(len(group.examples))]
        weights = micro_batch.target_weights
        alone = [MicroBatch(Pack((group,)), (weight,)) for group, weight in zip(groups, weights, strict=True)]
        return self._compiled([batch_maker.pack(micro_batch) for micro_batch in alone])

    def _compiled(self, batches: list[dict[str, Any]]) -> Outcome:
        with packed_attention(self.model, compiled=True):
            return self.outcome(batch | {"tokens_per_pack": max(LIMITS)} for batch in batches)

    def rows(self, batch_maker: BatchMaker, micro_batch: MicroBatch) -> Outcome:
        """Each question as a padded row, as transformers computes it, in random order."""
        return self.stock(
            stock_rows(batch_maker.dataset, batch_maker.packs.step_of([micro_batch])[0], NUM_ROWS, DEVICE)
        )


@dataclass
class Measured:
    """One pack and the distances of its loss and gradient."""

    length: int
    num_new_graphs: int
    sharing: tuple[float, float]
    """Distances of sharing from rows, both in bfloat16."""
    spread: tuple[float, float]
    """Distances of each question alone from rows, both in bfloat16."""
    shared_exact: tuple[float, float]
    """Distances of sharing from rows in float32."""
    rows_exact: tuple[float, float]
    """Distances of rows from rows in float32."""


@pytest.fixture(scope="module")
def measured(
    sessions: list[OpenRun], session: OpenRun, random_lora: Callable[..., Any], exact_float32: None
) -> list[Measured]:
    """All packs, small and large images in turn."""
    rounded, exact = (Computation(session, precision, random_lora) for precision in ("bf16", "fp32"))
    found = []
    for batch_maker, micro_batch in islice(packs(sessions), NUM_PACKS):
        before = num_compiled_graphs()
        shared, alone = rounded.shared(batch_maker, micro_batch), rounded.alone(batch_maker, micro_batch)
        num_new_graphs, length = num_compiled_graphs() - before, padded_length(micro_batch.pack.num_tokens)
        rows, exact_rows = rounded.rows(batch_maker, micro_batch), exact.rows(batch_maker, micro_batch)
        yardstick = shared.distance(exact_rows), rows.distance(exact_rows)
        distances = shared.distance(rows), alone.distance(rows), *yardstick
        found.append(Measured(length, num_new_graphs, *distances))
    return found


RESULTS = {"loss": 0, "gradient": 1}


def distances(measured: list[Measured], name: str, result: str) -> list[float]:
    found = [getattr(one, name)[RESULTS[result]] for one in measured]
    print(f"{result:9} {name:15} mean {mean(found):.2e}  max {max(found):.2e}")
    return found


@pytest.mark.guarantee(
    "On a GPU in bfloat16, with FlexAttention and compilation, sharing differs from separate samples by no "
    "more than separate samples differ from themselves in another order."
)
@pytest.mark.parametrize("result", RESULTS)
def test_sharing_differs_from_rows_no_more_than_each_question_alone_does(measured, result):
    sharing, spread = (distances(measured, name, result) for name in ("sharing", "spread"))
    assert mean(sharing) <= 1.5 * mean(spread)
    assert max(sharing) <= 2 * max(spread)


@pytest.mark.guarantee(
    "LoRA in one matrix with frozen weights, and within an MLP, gives PEFT's results to rounding, in each family."
)
@pytest.mark.guarantee(
    "The last layer, computed for some tokens only, has the loss and gradients of the stock layer, in each family."
)
@pytest.mark.parametrize("result", RESULTS)
def test_sharing_is_as_near_to_float32_as_rows_are(measured, result):
    shared, rows = (distances(measured, name, result) for name in ("shared_exact", "rows_exact"))
    assert mean(shared) <= 1.25 * mean(rows)
    assert max(shared) <= 2 * max(rows)


def test_packs_of_all_lengths_use_the_graphs_compiled_for_the_first(measured):
    assert len(measured) >= 50 and len({one.length for one in measured}) >= 8
    assert measured[0].num_new_graphs > 0
    assert [one.num_new_graphs for one in measured[1:]] == [0] * (len(measured) - 1)


@pytest.mark.guarantee("Captured passes accumulate the gradients of a step as launched passes do.")
@pytest.mark.guarantee("A replayed CUDA graph is bit-identical to the launched pass.")
def test_replayed_passes_have_the_bits_of_launched_ones(sessions, session, random_lora):
    """With packs of many lengths in any order, each length several times."""
    rounded = Computation(session, "bf16", random_lora)
    replays = Replays(rounded, session.chat_tokenizer.merge_size, max(LIMITS))
    with packed_attention(rounded.model, compiled=True):
        for batch_maker, micro_batch in islice(packs(sessions), NUM_PACKS):
            pack = batch_maker.pack(micro_batch)
            launched, replayed = replays.launched(pack), replays.replayed(pack)
            assert torch.equal(replayed.loss, launched.loss)
            assert all(map(torch.equal, replayed.gradients.values(), launched.gradients.values()))


def test_replayed_passes_draw_new_dropout_and_the_same_from_the_same_random_state(sessions, session, random_lora):
    run = session.run
    run = run.model_copy(update={"lora": run.lora.model_copy(update={"dropout": 0.3})})
    session = session.changed(run=run)
    rounded = Computation(session, "bf16", random_lora)
    rounded.model.train()
    replays = Replays(rounded, session.chat_tokenizer.merge_size, max(LIMITS))
    batch_maker, micro_batch = next(packs(sessions))
    pack = batch_maker.pack(micro_batch)
    with packed_attention(rounded.model, compiled=True):
        replays.launched(pack)
        replays.replayed(pack)
        torch.cuda.manual_seed(1)
        first, second = (flat(replays.replayed(pack)) for _ in range(2))
        torch.cuda.manual_seed(1)
        again = flat(replays.replayed(pack))
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_a_wrong_mask_would_be_noticed(sessions, session, random_lora, measured):
    """The wrong mask lets questions attend to all that is before them."""
    batch_maker, micro_batch = next(
        (batch_maker, micro_batch)
        for batch_maker, micro_batch in packs(sessions)
        if max(len(group.examples) for group in micro_batch.pack.groups) > 4
    )
    rounded, batch = Computation(session, "bf16", random_lora), batch_maker.pack(micro_batch)
    with packed_attention(rounded.model, compiled=True):
        wrong = rounded.outcome(
            [batch | {"seen_until": torch.full_like(batch["seen_until"], len(batch["seen_until"]))}]
        )
    found = wrong.distance(rounded.rows(batch_maker, micro_batch))
    print(f"a wrong mask: loss {found[0]:.2e}, gradient {found[1]:.2e}")
    # The loss would not show it: the model is untrained, so its loss hardly depends on what a question sees.
    assert found[1] > 5 * max(distances(measured, "sharing", "gradient"))
