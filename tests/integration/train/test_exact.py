"""Training from the cache equals training the stock model with its tower: the same logits, loss and LoRA gradients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainings import gradients, stock_logits_and_labels

from lookonce.datasets.images import image_size
from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.train.data.batches import IGNORED, Batch, Pixels, RowCollator
from lookonce.train.model.load import PRECISIONS, load_with_tower, load_without_tower
from lookonce.train.model.loss import LOSS_KEYS, weighted_loss

TOLERANCE = 1e-5
NUM_SIZES = 5
MAX_PIXELS = 120_000
"""Large enough that every image size of the sample has its own grid."""
PIXELS = {"min_pixels": 1, "max_pixels": MAX_PIXELS}


@dataclass
class Outcome:
    """The results of one computation of a batch."""

    logits: torch.Tensor
    """Logits at the supervised positions, `[tokens, vocabulary]`."""
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance in the Euclidean norm."""
    return float((found - expected).norm() / expected.norm())


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert distance(found.logits, expected.logits) < TOLERANCE
    assert distance(found.loss, expected.loss) < TOLERANCE
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert gradient.abs().max() > 0, name
        assert distance(found.gradients[name], gradient) < TOLERANCE, name


def mixed_records(sample: Path) -> list[Record]:
    """Images of different sizes, one and two at a time, several turns, a system text, and no image at all."""
    records = read_records(sample / "train.jsonl")
    by_size = {image_size(record.images[0].read_bytes()): record for record in records}
    singles = list(by_size.values())[:NUM_SIZES]
    assert len(singles) >= NUM_SIZES - 1  # two have one shape
    turns = singles[0].turns + singles[1].turns
    return [
        *singles,
        Record((*singles[2].images, *singles[0].images), turns, system="Answer briefly."),
        Record((), (Turn("Is there text?", "no"),)),
    ]


@pytest.fixture
def session(sample, make_run, tmp_path) -> OpenRun:
    write_records(tmp_path / "mixed.jsonl", mixed_records(sample), image_root=sample)
    data = {"train": str(tmp_path / "mixed.jsonl"), "val": [], "test": [], "image_root": str(sample)}
    inputs = open_run(make_run(data=data, lora={"modules_to_save": ["embed_tokens"]}, cache=PIXELS), TO_BUILD)
    inputs.build()
    return inputs


def through_lookonce(model: Any, batch: Batch) -> Outcome:
    inputs = {name: tensor for name, tensor in batch.items() if name not in LOSS_KEYS}
    logits = model(**inputs, use_cache=False).logits
    loss = weighted_loss(logits, batch["targets"], batch["weights"])
    loss.backward()
    chosen = batch["targets"] != IGNORED
    return Outcome(logits[chosen].detach(), loss.detach(), gradients(model))


def through_stock(model: Any, processor: Any, session: OpenRun) -> Outcome:
    """Use only transformers' own code, to the shifted cross-entropy."""
    logits, labels = stock_logits_and_labels(model, processor, session, PIXELS)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    return Outcome(logits[labels != IGNORED].detach(), loss.detach(), gradients(model))


@pytest.mark.guarantee(
    "Training from the cache has the same logits, loss and gradients of everything trained as the stock model,"
    " to 1e-5 relative in float32: for images of different sizes, several images, several turns and no image "
    "in one batch."
)
def test_cached_equals_the_stock_model_with_its_tower_and_pixels(session, sample, stock_processor, random_lora):
    batch = session.row_collator()(session.examples("train")[0])
    found = through_lookonce(random_lora(session, load_without_tower), batch)
    expected = through_stock(random_lora(session, load_with_tower), stock_processor(sample / "model"), session)
    assert len({tuple(grid) for grid in batch["image_grid_thw"].tolist()}) >= NUM_SIZES - 1  # two have one shape
    assert any("embed_tokens" in name for name in expected.gradients)
    assert_equal(found, expected)


def test_our_collator_with_pixels_equals_the_stock_processor(session, sample, stock_processor, random_lora):
    pixels = Pixels(session.processor, session.images.path_of)
    collator = RowCollator(pixels, session.row_collator().image_token_id, session.row_collator().pad_token_id)
    found = through_lookonce(random_lora(session, load_with_tower), collator(session.examples("train")[0]))
    expected = through_stock(random_lora(session, load_with_tower), stock_processor(sample / "model"), session)
    assert_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_in_bfloat16_on_a_gpu_cached_differs_from_stock_no_more_than_bfloat16_does(make_run, session, random_lora):
    """The yardstick is the distance of stock training in bfloat16 from stock training in float32."""
    inputs = open_run(make_run(data=session.run.data.model_dump(), cache=PIXELS | {"dtype": "bfloat16"}), TO_BUILD)
    inputs.build()
    pixels = inputs.row_collator(Pixels(inputs.processor, inputs.images.path_of))

    def loss_and_gradient(load: Any, collator: RowCollator, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
        model = random_lora(inputs, load, PRECISIONS[precision]).cuda()
        batch = {name: tensor.cuda() for name, tensor in collator(inputs.examples("train")[0]).items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            outcome = through_lookonce(model, batch)
        gradient = torch.cat([grad.flatten().float().cpu() for grad in outcome.gradients.values()])
        return outcome.loss.cpu(), gradient

    exact = loss_and_gradient(load_with_tower, pixels, "fp32")
    stock = loss_and_gradient(load_with_tower, pixels, "bf16")
    found = loss_and_gradient(load_without_tower, inputs.row_collator(), "bf16")
    for ours, theirs, true in zip(found, stock, exact, strict=True):
        assert distance(ours, true) < 1.5 * distance(theirs, true) + 1e-3
