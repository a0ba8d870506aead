"""The ways to train that are compared: transformers' own Trainer as people use it, and ours.

plain      the stock Trainer: a row a question, padded, random order, the tower in every step
liger      the same with Liger's kernels (https://github.com/linkedin/Liger-Kernel)
cached     rows as well, but features from the cache and logits only where they are supervised
tower      `packed` with the tower in every step: the best that a trainer without padding can do
packed     no padding, from the cache; each question with its own copy of the image
shared     all questions about an image share one pass over its tokens

Each goes through its whole pipeline: reading, batches, Trainer's loop, optimizer, logging.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import Trainer

from lookonce.errors import UsageError
from lookonce.run.config import RunFile
from lookonce.text import Notify
from lookonce.train.data.collate_rows import IGNORED, Collator
from lookonce.train.data.features import Batch, Pixels
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.metrics_log import STOCK_PRINTERS
from lookonce.train.loop.session import Session, make_trainer
from lookonce.train.loop.trainer import training_arguments
from lookonce.train.model.load import PRECISIONS, add_lora, load_with_tower, load_without_tower

PLAIN_ROWS = 4
"""A forward pass of the plain ways, as people train: more do not fit a GPU of 80 GB."""


@dataclass(frozen=True)
class Way:
    """One of them."""

    name: str
    says: str
    mode: str | None
    """Of our batches; None for the stock Trainer's."""
    has_tower: bool
    needs: str = ""
    """A package."""

    @property
    def has_packs(self) -> bool:
        return self.mode in ("packed", "shared")


WAYS = {
    way.name: way
    for way in (
        Way("plain", "stock Trainer, padded rows, tower in every step", None, True),
        Way("liger", "the same with Liger's kernels", None, True, "liger_kernel"),
        Way("cached", "padded rows, features from the cache", "separate", False),
        Way("tower", "packs, every question its own image, tower in every step", "packed", True),
        Way("packed", "packs, every question its own image, from the cache", "packed", False),
        Way("shared", "packs, questions share their image, from the cache", "shared", False),
    )
}


def way_of(run: RunFile) -> str:
    """The way that a run file trains."""
    return run.batch.mode if run.batch.has_packs else "cached"


def find_ways(names: Sequence[str]) -> list[Way]:
    """The ways of these names, Liger's last, which changes transformers' classes for good.

    Raises:
        UsageError: there is no such way, or it needs a package that is not here.
    """
    for name in names:
        if name not in WAYS:
            raise UsageError(f"no way of training is named {name!r}; choose from {', '.join(WAYS)}")
        if WAYS[name].needs and importlib.util.find_spec(WAYS[name].needs) is None:
            raise UsageError(f"{name} needs {WAYS[name].needs}; install it with: pip install liger-kernel")
    return sorted((WAYS[name] for name in names), key=lambda way: way.name == "liger")


def set_up(
    way: Way,
    session: Session,
    examples: Sequence[Example],
    num_steps: int,
    folder: Path,
    notify: Notify,
) -> tuple[Any, Any]:
    """The model with a fresh adapter and the trainer of so many steps, which saves nothing; `notify` gets its notes."""
    if way.name == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_vl

        apply_liger_kernel_to_qwen3_vl()
    session = _with_run(session, _run_of(way, session.inputs.run))
    inputs, run = session.inputs, session.inputs.run
    load = load_with_tower if way.has_tower else load_without_tower
    model = load(inputs.model_folder, PRECISIONS[run.train.precision], run.model.attention)
    model = add_lora(model, inputs.model_folder, run.lora, run.train.seed)
    arguments: dict[str, Any] = {
        "max_steps": num_steps,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "report_to": "none",
    }
    if way.mode is None:
        return model, _stock_trainer(session, model, examples, folder, arguments)
    pixels = Pixels(inputs.processor, inputs.images.path_of) if way.has_tower else None
    settings = training_arguments(run, folder, **arguments)
    return model, make_trainer(session, model, settings, examples, vision=pixels, notify=notify)


def _run_of(way: Way, run: RunFile) -> RunFile:
    changes = {"mode": way.mode, "samples_per_forward": PLAIN_ROWS} if way.mode else {}
    return run.model_copy(update={"batch": run.batch.model_copy(update=changes)})


def _with_run(session: Session, run: RunFile) -> Session:
    return replace(session, inputs=replace(session.inputs, run=run))


def _stock_trainer(
    session: Session, model: Any, examples: Sequence[Example], folder: Path, arguments: dict[str, Any]
) -> Any:
    inputs, run = session.inputs, session.inputs.run
    rows = min(PLAIN_ROWS, run.batch.samples_per_step)
    at_once = rows * int(os.environ.get("WORLD_SIZE", 1))
    settings = training_arguments(
        run,
        folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=max(run.batch.samples_per_step // at_once, 1),
        dataloader_num_workers=_num_loader_workers(),
        dataloader_pin_memory=torch.cuda.is_available(),
        **arguments,
    )
    pixels = Pixels(inputs.processor, inputs.images.path_of)
    collate = StockCollator(replace(session.collator, vision=pixels))
    trainer = Trainer(model, settings, data_collator=collate, train_dataset=examples)
    for printer in STOCK_PRINTERS:
        trainer.remove_callback(printer)
    return trainer


def _num_loader_workers() -> int:
    return min(len(os.sched_getaffinity(0)) - 1, 8) if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class StockCollator:
    """Batches as transformers' models take them: whole labels, and the loss is the model's own."""

    rows: Collator

    def __call__(self, examples: Sequence[Example]) -> Batch:
        batch = self.rows(examples)
        del batch["logits_to_keep"], batch["targets"], batch["weights"]
        length = batch["input_ids"].shape[1]
        flags = [torch.from_numpy(example.expanded(self.rows.image_token_id)[1]) for example in examples]
        supervised = torch.stack([pad(row, (0, length - len(row))) for row in flags])
        return batch | {"labels": torch.where(supervised, batch["input_ids"], IGNORED)}
