"""Captured passes reuse their input tensors, and give what each batch gives alone, whatever was in the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import BatchMaker

from lookonce.errors import UsageError
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.run.sections import BatchSection
from lookonce.train.data.batches import Batch
from lookonce.train.data.sampler import Sampler
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.loss import forward_loss
from lookonce.train.model.packs import CapturedPasses, shape_of_batch

CPU = torch.device("cpu")
Step = tuple[torch.Tensor, list[torch.Tensor]]


class Passes:
    """A model's forward and backward passes, launched directly or as if replayed: on the tensors of the capture."""

    def __init__(self, session: OpenRun, model: Any) -> None:
        self.model = model
        self.trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.mask = PackMask(2048, CPU)
        self.num_captured = 0
        self.captured = CapturedPasses(self.loss, self.trained, session.chat_tokenizer.merge_size, lambda: self.capture)

    def loss(self, batch: Batch) -> torch.Tensor:
        return forward_loss(self.model, batch, self.mask)

    def capture(self, function):
        self.num_captured += 1
        return function

    def step(self, batches: list[Batch], loss_of: Callable[[Batch], torch.Tensor] | None = None) -> Step:
        """Loss and gradients from launched passes, or from those of `loss_of`."""
        self.model.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for batch in batches:
            loss: Any = (loss_of or self.loss)(batch)
            loss.backward()
            total += loss.detach()
        return total, [weight.grad.clone() for weight in self.trained]

    def captured_step(self, batches: list[Batch]) -> Step:
        return self.step(batches, self.captured)


@pytest.fixture(scope="module")
def session(sample: Path, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory) -> OpenRun:
    data = {"train": str(sample / "test.jsonl"), "val": [], "test": []}
    lora = {"modules_to_save": ["embed_tokens"]}
    folder = tmp_path_factory.mktemp("cuda_graphs")
    inputs = open_run(make_run_in(folder, data=data, cache={"min_pixels": 1}, lora=lora), TO_BUILD)
    inputs.build()
    return inputs


@pytest.fixture(scope="module")
def passes(session: OpenRun, random_lora: Callable[..., Any]) -> Iterator[Passes]:
    passes = Passes(session, random_lora(session))
    with training_on_packs(passes.model, compiled=False):
        yield passes


def steps(session: OpenRun, **batch: object) -> list[list[Batch]]:
    options = BatchSection(**{"tokens_per_pack": 700} | batch)
    examples, _ = session.examples("train")
    sampler = Sampler.of(examples, session.chat_tokenizer.image_token_id, options, seed=1)
    batch_maker = BatchMaker(sampler, session.chat_tokenizer, session.features, CPU, pads=True)
    return [[batch_maker.batch(micro_batch) for micro_batch in step] for step in sampler.epoch(0)]


def without_images(batch: Batch) -> Batch:
    """The same batch with text tokens instead of image tokens."""
    text = {name: tensor for name, tensor in batch.items() if name not in ("pixel_values", "image_grid_thw")}
    return text | {"input_ids": torch.full_like(batch["input_ids"], 7)}


def assert_same(found, expected) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for one, other in zip(found[1], expected[1], strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.guarantee("What another pack left in the buffers of a CUDA graph has no effect.")
def test_every_step_has_the_loss_and_the_gradients_of_its_own_packs(passes, session):
    """Packs of one length have few and many images and answers in turn."""
    batches = steps(session, samples_per_step=6) + steps(session, samples_per_step=40)
    batches.insert(3, [without_images(batch) for batch in batches[-1]])
    for step in batches:
        assert_same(passes.captured_step(step), passes.step(step))
    lengths = {(batch["input_ids"].shape[1], "pixel_values" in batch) for step in batches for batch in step}
    assert len(lengths) <= passes.num_captured < sum(map(len, batches))


def test_passes_of_all_shapes_can_be_captured_from_one_batch(session, passes):
    batches = steps(session, samples_per_step=6) + steps(session, samples_per_step=40)
    batches.append([without_images(batch) for batch in batches[0]])
    shapes = {shape_of_batch(batch) for step in batches for batch in step}
    captured = CapturedPasses(passes.loss, passes.trained, session.chat_tokenizer.merge_size, lambda: passes.capture)
    for shape in sorted(shapes, reverse=True):
        captured.prepare(shape, like=batches[0][0])
    before = passes.num_captured
    for step in batches:
        assert_same(passes.step(step, captured), passes.step(step))
    assert passes.num_captured == before and len(shapes) > 2


def test_the_gradient_of_a_loss_scales_with_that_of_what_is_made_of_it(passes, session):
    [batch] = steps(session, samples_per_step=6)[0]
    loss, expected = passes.step([batch])
    scaled, found = passes.step([batch], lambda batch: 3 * passes.captured(batch))
    assert_same((scaled / 3, [gradient / 3 for gradient in found]), (loss, expected))


def test_a_loss_whose_gradients_are_gone_is_refused(passes, session):
    """Those of a pass are there until the next pass, and are used once."""
    [first, second] = [batches[0] for batches in steps(session, samples_per_step=6)[:2]]
    loss: Any = passes.captured(first)
    passes.captured(second)
    with pytest.raises(UsageError, match="call backward once for each loss of pack_loss, before the next"):
        loss.backward()
    loss = passes.captured(first)
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="once they are used"):
        loss.backward()
