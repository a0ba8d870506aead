"""On a GPU, on the same quantised weights: sharing is as exact as each question alone, compiled and captured.

Products of quantised weights in bfloat16 are rounded differently in packs and in rows, and int8 and fp8 round their
inputs. So the yardstick is the distance between two computations of each question alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from support.batches import BatchMaker, Replays
from support.trainings import COMPILED_ON_GPU, needs_bitsandbytes

from lookonce.cache.store.reader import VisionCache
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.run.sections import BatchSection
from lookonce.selftest.model import Outcome, Passes, stock_rows
from lookonce.train.data.packing import Pack
from lookonce.train.data.sampler import MicroBatch, Sampler
from lookonce.train.loop.first_pack import VARIABLE
from lookonce.train.model.compile import num_compiled_graphs
from lookonce.train.model.load import PRECISIONS, load_without_tower
from lookonce.train.model.packs import packed_attention
from lookonce.workflow import train

pytestmark = COMPILED_ON_GPU

DEVICE = torch.device("cuda")
TOKENS = 1024
NUM_PACKS = 32
NUM_ROWS = 8
"""Rows in a forward pass where each question is a padded row."""
TOLERANCE = 1e-4
KINDS = ("fp8", *(pytest.param(kind, marks=needs_bitsandbytes) for kind in ("nf4", "int8")))


@pytest.fixture(scope="module")
def session(sample: Path, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    data = {"train": str(sample / "train.jsonl"), "val": [], "test": []}
    cache = {"dtype": "bfloat16", "min_pixels": 1, "max_pixels": 120_000}
    inputs = open_run(make_run_in(tmp_path_factory.mktemp("frozen"), data=data, cache=cache), TO_BUILD)
    inputs.build()
    return inputs


def packs(session: OpenRun) -> Iterator[tuple[BatchMaker, MicroBatch]]:
    """Packs of many lengths, with few and many questions."""
    examples, tokenizer = session.examples("train")[0], session.chat_tokenizer
    for seed in range(NUM_PACKS):
        options = BatchSection(samples_per_step=(2, 12, 30, 60)[seed % 4], tokens_per_pack=TOKENS)
        sampler = Sampler.of(examples, tokenizer.image_token_id, options, seed)
        batches = BatchMaker(sampler, tokenizer, session.features, DEVICE, pads=True)
        yield batches, next(sampler.epoch(0))[0]


class Computation(Passes):
    """Computes packs on quantised weights in one precision."""

    def __init__(self, session: OpenRun, random_lora: Callable[..., Any], frozen: str, precision: str) -> None:
        model = random_lora(session, partial(load_without_tower, frozen=frozen), PRECISIONS[precision])
        model = model.to(DEVICE) if frozen == "fp8" else model  # bitsandbytes' models are there
        super().__init__(model, PRECISIONS[precision], DEVICE)

    def compiled(self, batches: list[dict[str, Any]]) -> Outcome:
        with packed_attention(self.model, compiled=True):
            return self.outcome(batches)

    def alone(self, batches: BatchMaker, micro_batch: MicroBatch) -> Outcome:
        """Each question in its own pack."""
        groups = [group.subset([row]) for group in micro_batch.pack.groups for row in range(len(group.examples))]
        alone = [
            MicroBatch(Pack((group,)), (weight,))
            for group, weight in zip(groups, micro_batch.target_weights, strict=True)
        ]
        return self.compiled([batches.pack(one) for one in alone])

    def rows(self, batches: BatchMaker, micro_batch: MicroBatch) -> Outcome:
        """Each question as a padded row, as transformers computes it."""
        return self.stock(stock_rows(batches.dataset, batches.packs.step_of([micro_batch])[0], NUM_ROWS, DEVICE))


@pytest.mark.parametrize("frozen", KINDS)
def test_sharing_differs_from_rows_no_more_than_each_question_alone_does(session, random_lora, frozen):
    computation = Computation(session, random_lora, frozen, "bf16")
    sharing, spread, new_graphs = [], [], []
    for batches, micro_batch in packs(session):
        rows, before = computation.rows(batches, micro_batch), num_compiled_graphs()
        sharing.append(computation.compiled([batches.pack(micro_batch)]).distance(rows))
        new_graphs.append(num_compiled_graphs() - before)
        spread.append(computation.alone(batches, micro_batch).distance(rows))
    for number, name in enumerate(("loss", "gradient")):
        found, allowed = [one[number] for one in sharing], [one[number] for one in spread]
        print(f"{frozen} {name}: sharing {mean(found):.2e}, at most {max(found):.2e}; alone {mean(allowed):.2e}")
        assert mean(found) <= 1.5 * mean(allowed)
    assert new_graphs[0] > 0 and not any(new_graphs[1:])


@pytest.mark.guarantee("On the same quantised weights, all batch modes have the same loss and gradients.")
@needs_bitsandbytes
def test_sharing_is_exact_in_float32(session, random_lora):
    computation = Computation(session, random_lora, "nf4", "fp32")
    for batches, micro_batch in islice(packs(session), 4):
        found = computation.compiled([batches.pack(micro_batch)])
        assert max(found.distance(computation.rows(batches, micro_batch))) < TOLERANCE


@pytest.mark.guarantee("On quantised weights, replayed passes are bit-identical to launched passes.")
@pytest.mark.parametrize("frozen", KINDS)
def test_replayed_passes_have_the_bits_of_launched_ones(session, random_lora, frozen):
    computation = Computation(session, random_lora, frozen, "bf16")
    replays = Replays(computation, session.chat_tokenizer.merge_size, TOKENS)
    with packed_attention(computation.model, compiled=True):
        for batches, micro_batch in packs(session):
            pack = batches.pack(micro_batch)
            launched, replayed = replays.launched(pack), replays.replayed(pack)
            assert torch.equal(replayed.loss, launched.loss)
            assert all(map(torch.equal, replayed.gradients.values(), launched.gradients.values()))


@pytest.mark.parametrize("frozen", KINDS)
def test_a_whole_run_checks_its_first_pack_trains_and_answers(
    make_run: Callable[..., RunFile], built: VisionCache, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    notes: list[str] = []
    options = {"steps": 20, "precision": "bf16", "frozen": frozen, "learning_rate": 5e-3}
    run = make_run(cache={"dir": str(built.folder.parent)}, train=options)
    train(run, notify=notes.append)
    assert any(note.startswith("the first pack agrees with") for note in notes)
    assert (run.output / "predictions" / "val.jsonl").exists()
