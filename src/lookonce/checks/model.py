"""The model of a run: its folder, its weights' files, tokenizer and chat template, and whether LoRA fits it.

Design: the weights are not read. The model is built without memory (on torch's meta device) and gets its adapter, so
PEFT itself says which modules are trained, and how many weights they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.checks.report import Result
from lookonce.checks.template import refusal, without_thinking
from lookonce.errors import LookonceError, ModelError
from lookonce.hub import locate
from lookonce.run.config import RunFile
from lookonce.text import listed, size
from lookonce.train.data.token_stats import TokenCounter

THINKS = "training refuses every record: the chat template lets the model think before it answers"
FETCH = "correct `model.path`, or where there is internet: lookonce fetch RUN.yaml"


@dataclass
class CheckedModel:
    """What of a model could be opened."""

    folder: Path | None = None
    model_folder: ModelFolder | None = None
    processor: ImageProcessor | None = None
    counter: TokenCounter | None = None
    num_trained: int | None = None
    """Number of weights that are trained."""


def check_model(run: RunFile) -> tuple[CheckedModel, list[Result]]:
    """Open the parts of the model one by one; nothing is downloaded."""
    model = CheckedModel()
    try:
        model.folder = locate(run.model.path, run.model.revision, is_local=True)
    except ModelError as error:
        return model, [Result("error", "model", str(error), FETCH)]
    results = [*_weights(run, model), *_tokenizer(run, model), *_lora(run, model)]
    return model, results


def _weights(run: RunFile, model: CheckedModel) -> Iterator[Result]:
    try:
        model.model_folder = ModelFolder.open(str(model.folder))
        absent = model.model_folder.absent_files()
    except LookonceError as error:
        yield Result("error", "model", str(error), FETCH)
        return
    if absent:
        yield Result("error", "model", f"{model.folder} lacks {listed(absent)} of its weights", FETCH)
        return
    num_bytes = sum(path.stat().st_size for path in model.model_folder.folder.glob("*.safetensors"))
    yield Result("ok", "model", f"{run.model.path}: {model.model_folder.family.model_type}, {size(num_bytes)}")


def _tokenizer(run: RunFile, model: CheckedModel) -> Iterator[Result]:
    assert model.folder
    options = run.cache
    try:
        model.processor = ImageProcessor(model.folder, options.backend, options.min_pixels, options.max_pixels)
    except LookonceError as error:
        yield Result("error", "images", str(error), FETCH)
    try:
        model.counter = TokenCounter(model.folder, enable_thinking=run.data.enable_thinking)
    except LookonceError as error:
        yield Result("error", "tokenizer", str(error), FETCH)
        return
    if told := without_thinking(model.folder, model.counter):
        model.counter = told  # the lengths of records are those with the key that is advised
        yield Result("error", "template", THINKS, "set `data.enable_thinking: false`; docs/models.md#thinking")
    elif refused := refusal(model.counter):
        model.counter = None
        yield Result("error", "template", f"training refuses {refused}", "use the model's own chat template")


def _lora(run: RunFile, model: CheckedModel) -> Iterator[Result]:
    from lookonce.train.model.compile import check_layers
    from lookonce.train.model.load import add_lora, replace_tower, text_model
    from lookonce.train.model.lora import beyond_targets

    if model.model_folder is None:
        return
    family, config = model.model_folder.family, model.model_folder.config
    try:
        if run.batch.has_packs or run.eval.engine == "shared":
            check_layers(family, config.get_text_config())
        with torch.device("meta"):
            stock_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
            stock = stock_class(config)
            replace_tower(stock, stock.dtype)
            trained = add_lora(stock.requires_grad_(False), model.model_folder, run.lora, run.train.seed)
    except LookonceError as error:
        yield Result("error", "adapter", str(error), "correct the section `lora`, or `batch.mode` and `eval.engine`")
        return
    model.num_trained = sum(weight.numel() for weight in trained.parameters() if weight.requires_grad)
    without = beyond_targets(text_model(trained).layers)
    yield Result(
        "ok",
        "adapter",
        f"rank {run.lora.rank}: {model.num_trained:,} trained weights{f'; {without}' if without else ''}",
    )
