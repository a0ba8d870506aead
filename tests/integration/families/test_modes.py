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
from support.trainings import Step, assert_same, batches, gradients, records, step, stock_logits_and_labels

from lookonce.run.open import OpenRun
from lookonce.train.data.batches import IGNORED
from lookonce.train.model import compile
from lookonce.train.model.load import load_with_tower, load_without_tower


def stock_step(session: OpenRun, random_lora: Callable[..., Any], stock_processor: Callable[[Path], Any]) -> Step:
    model = random_lora(session, load_with_tower)
    logits, labels = stock_logits_and_labels(model, stock_processor(session.model_folder.folder), session)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.item(), gradients(model)


def assert_every_mode_trains_like_the_stock_model(session: OpenRun, random_lora: Any, stock_processor: Any) -> None:
    expected = stock_step(session, random_lora, stock_processor)
    assert len(expected[1]) >= 2 * 4 * 4
    assert any(".experts." in name for name in expected[1]) == session.run.lora.experts
    model = random_lora(session, load_without_tower)
    for mode, joins in (("shared", False), ("packed", False), ("separate", False), ("shared", True)):
        with mock.patch.object(compile, "_joins", return_value=joins):  # which is for GPUs
            found = step(model, batches(session, mode))
        assert_same(found, expected)


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
    for lora in ({}, {"experts": True}) if site.family.experts else ({},):
        session = site.session(records(sample), sample, **lora)
        assert_every_mode_trains_like_the_stock_model(session, random_lora, stock_processor)
