"""In each family, every mode has the loss and the LoRA gradients of the stock model with tower, processor and rows.

So has LoRA in one matrix with frozen weights, which is computed on a GPU only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from support.trainings import SIZES, Step, batches, gradients, records, step

from lookonce.datasets.records import write_records
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.train.data.batches import IGNORED
from lookonce.train.data.tokenize import to_messages
from lookonce.train.model import compile
from lookonce.train.model.load import load_with_tower, load_without_tower

TOLERANCE = 1e-5


def stock_step(session: OpenRun, random_lora: Callable[..., Any], stock_processor: Callable[[Path], Any]) -> Step:
    """By transformers' own code: processor, padding, tower, full logits, cross-entropy."""
    shown = session.records["train"]
    processor = stock_processor(session.model_folder.folder)
    processor.image_processor.size = {"shortest_edge": SIZES["min_pixels"], "longest_edge": SIZES["max_pixels"]}
    texts = [processor.apply_chat_template(to_messages(record), tokenize=False) for record in shown]
    images = [Image.open(path).convert("RGB") for record in shown for path in record.images]
    batch = processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
    labels = torch.full_like(batch["input_ids"], IGNORED)
    for row, example in enumerate(session.examples("train")[0]):
        ids, flags = example.expanded(session.chat_tokenizer.image_token_id)
        assert batch["input_ids"][row, : len(ids)].tolist() == ids.tolist()
        labels[row, : len(ids)] = torch.from_numpy(ids).long().masked_fill(~torch.from_numpy(flags), IGNORED)
    model = random_lora(session, load_with_tower)
    logits = model(**batch, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.item(), gradients(model)


def assert_every_mode_trains_like_the_stock_model(session: OpenRun, random_lora: Any, stock_processor: Any) -> None:
    stock_loss, expected = stock_step(session, random_lora, stock_processor)
    assert all(gradient.abs().max() > 0 for gradient in expected.values()) and len(expected) >= 2 * 4 * 4
    assert any(".experts." in name for name in expected) == session.run.lora.experts
    model = random_lora(session, load_without_tower)
    for mode, joins in (("shared", False), ("packed", False), ("separate", False), ("shared", True)):
        with mock.patch.object(compile, "_joins", return_value=joins):  # which is for GPUs
            loss, found = step(model, batches(session, mode))
        assert abs(loss - stock_loss) < TOLERANCE * stock_loss, (mode, joins)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() < TOLERANCE * gradient.norm(), (mode, joins, name)


@pytest.mark.guarantee(
    "Questions that share one pass over their image have the same loss and gradients of everything trained as "
    "separate samples, to 1e-5 relative in float32: for images of different sizes, 1 to 17 questions each, "
    "several turns, a system text, several images, with and without DeepStack, cut into packs in any way."
)
@pytest.mark.guarantee(
    "LoRA in one matrix with frozen weights, and within an MLP, gives PEFT's results to rounding, in each family."
)
@pytest.mark.guarantee(
    "LoRA with its scale in matrix B gives PEFT's results, to the last bit if the scale is a power of two, in "
    "each family."
)
@pytest.mark.guarantee(
    "The last layer, computed for some tokens only, has the loss and gradients of the stock layer, in each family."
)
@pytest.mark.guarantee(
    "In each family of models, with its default LoRA targets, every batch mode has the same loss and LoRA "
    "gradients as the stock model with its tower, to 1e-5 in float32."
)
def test_every_mode_trains_like_the_stock_model(site, sample, random_lora, stock_processor):
    write_records(site.folder / "records.jsonl", records(sample), image_root=sample)
    data = {"train": str(site.folder / "records.jsonl"), "val": [], "test": [], "image_root": str(sample)}
    for lora in ({}, {"experts": True}) if site.family.experts else ({},):
        inputs = open_run(site.make_run(data=data, cache=SIZES, lora=lora), TO_BUILD)
        inputs.build()
        assert_every_mode_trains_like_the_stock_model(inputs, random_lora, stock_processor)
