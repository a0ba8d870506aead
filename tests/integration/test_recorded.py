"""Recorded passes: the same tensors again and again, whatever was in them before, give what each batch gives alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lookonce.errors import TrainingError
from lookonce.run.config import BatchSection, RunFile
from lookonce.run.inputs import Inputs
from lookonce.train.data.batches import Feed
from lookonce.train.data.features import Batch
from lookonce.train.data.sampler import Order
from lookonce.train.loop.session import Session
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.cuda_graphs import LEAST_TARGETS, RecordedPasses, room_for, shape_of_batch
from lookonce.train.model.load import add_lora, load_without_tower
from lookonce.train.model.loss import forward_loss

CPU = torch.device("cpu")


class Passes:
    """A model's passes, each called as it is and as if it were recorded: on the tensors that it was recorded with."""

    def __init__(self, session: Session) -> None:
        inputs = session.inputs
        self.model = add_lora(
            load_without_tower(inputs.model_folder, torch.float32), inputs.model_folder, inputs.run.lora, seed=0
        )
        torch.manual_seed(0)
        for name, weight in self.model.named_parameters():
            if "lora_B" in name:
                weight.data.normal_(std=0.1)
        self.trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.mask = PackMask(2048, CPU)
        self.num_recorded = 0
        self.recorded = RecordedPasses(self.run, self.trained, session.prompter.merge_size, self.record)

    def run(self, batch: Batch) -> torch.Tensor:
        loss = forward_loss(self.model, batch, self.mask)
        loss.backward()
        return loss.detach()

    def record(self, function):
        self.num_recorded += 1
        return function

    def step(self, batches: list[Batch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Loss and gradients, from passes as they are."""
        self.model.zero_grad(set_to_none=True)
        loss = sum((self.run(batch) for batch in batches), torch.zeros(()))
        return loss, [weight.grad.clone() for weight in self.trained]

    def recorded_step(self, batches: list[Batch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        self.recorded.begin_step()
        loss = sum((self.recorded(batch) for batch in batches), torch.zeros(()))
        return loss, [weight.grad.clone() for weight in self.trained]


@pytest.fixture(scope="module")
def session(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    values = {
        "model": {"path": str(sample / "model")},
        "data": {"train": str(sample / "test.jsonl")},
        "cache": {"dir": str(tmp_path_factory.mktemp("caches")), "dtype": "float32", "min_pixels": 1},
        "lora": {"rank": 4, "modules_to_save": ["embed_tokens"]},
        "output": "unused",
    }
    inputs = Inputs.open(RunFile.model_validate(values))
    inputs.build()
    return Session.open(inputs)


@pytest.fixture(scope="module")
def passes(session: Session) -> Iterator[Passes]:
    passes = Passes(session)
    with training_on_packs(passes.model, compiled=False):
        yield passes


def steps(session: Session, **batch: object) -> list[list[Batch]]:
    options = BatchSection(**{"tokens_per_pack": 700} | batch)
    examples, _ = session.examples("train")
    order = Order.of(examples, session.prompter.image_token_id, options, seed=1)
    feed = Feed(order, session.prompter, session.collator.vision, CPU, in_blocks=True)
    return [[feed.batch(forward) for forward in step] for step in order.epoch(0)]


def without_images(batch: Batch) -> Batch:
    """The same with text in the images' places."""
    text = {name: tensor for name, tensor in batch.items() if name not in ("pixel_values", "image_grid_thw")}
    return text | {"input_ids": torch.full_like(batch["input_ids"], 7)}


def assert_same(found, expected) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_every_step_has_the_loss_and_the_gradients_of_its_own_packs(passes, session):
    """Packs of a length come with few and many images and answers, in turn."""
    batches = steps(session, samples_per_step=6) + steps(session, samples_per_step=40)
    batches.insert(3, [without_images(batch) for batch in batches[-1]])
    for step in batches:
        assert_same(passes.recorded_step(step), passes.step(step))
    lengths = {(batch["input_ids"].shape[1], "pixel_values" in batch) for step in batches for batch in step}
    assert len(lengths) <= passes.num_recorded < sum(map(len, batches))


def test_passes_of_all_shapes_can_be_recorded_from_one_batch(session, passes):
    batches = steps(session, samples_per_step=6) + steps(session, samples_per_step=40)
    batches.append([without_images(batch) for batch in batches[0]])
    shapes = {shape_of_batch(batch) for step in batches for batch in step}
    recorded = RecordedPasses(passes.run, passes.trained, session.prompter.merge_size, passes.record)
    for shape in shapes:
        recorded.prepare(shape, like=batches[0][0])
    before = passes.num_recorded
    for step in batches:
        recorded.begin_step()
        loss = sum((recorded(batch) for batch in step), torch.zeros(()))
        gradients = [weight.grad.clone() for weight in passes.trained]
        assert_same((loss, gradients), passes.step(step))
    assert passes.num_recorded == before and len(shapes) > 2


def test_gradients_begin_at_zero_in_the_same_tensors_even_if_they_were_dropped(passes, session):
    [first, second, *_] = steps(session, samples_per_step=6)
    passes.recorded_step(first)
    places = [weight.grad.data_ptr() for weight in passes.trained]
    passes.model.zero_grad(set_to_none=True)
    assert_same(passes.recorded_step(second), passes.step(second))
    passes.recorded.begin_step()
    assert [weight.grad.data_ptr() for weight in passes.trained] == places
    assert not any(weight.grad.any() for weight in passes.trained)


@pytest.mark.parametrize(
    ("num_targets", "expected"),
    [(1, LEAST_TARGETS), (LEAST_TARGETS, LEAST_TARGETS), (LEAST_TARGETS + 1, 2 * LEAST_TARGETS), (1024, 1024)],
)
def test_there_is_room_for_powers_of_two(num_targets, expected):
    assert room_for(num_targets) == expected


def test_what_can_not_be_recorded_says_how_to_go_on_without(passes, session):
    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    recorded = RecordedPasses(passes.run, passes.trained, session.prompter.merge_size, refuse)
    with pytest.raises(
        TrainingError, match=r"\(operation not permitted .* capturing\); .* --resume --set train.cuda_graphs=false"
    ):
        recorded(steps(session, samples_per_step=6)[0][0])
