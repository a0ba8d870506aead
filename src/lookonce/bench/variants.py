"""The training variants that `lookonce bench step` compares: transformers' Trainer as commonly used, and ours.

plain      stock Trainer: one padded row per question, random order, the tower in every step
liger      the same with Liger's kernels (https://github.com/linkedin/Liger-Kernel)
cached     padded rows too, but features from the cache and logits of targets only
tower      `packed` with the tower in every step: the best that a trainer without padding can do
packed     no padding, from the cache; each question with its own copy of the image
shared     all questions about an image share one pass over its tokens
fp8        `shared` with the frozen weights' products in fp8

Each variant runs its whole pipeline: reading, batches, Trainer's loop, optimizer, logging.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import Trainer, TrainingArguments

from lookonce import environment
from lookonce.errors import UsageError
from lookonce.families.family import Family
from lookonce.run.config import RunFile
from lookonce.run.open import OpenRun
from lookonce.run.sections.train import UNQUANTISED, Frozen
from lookonce.run.startup import Startup
from lookonce.text import Notify
from lookonce.train.data.batches import IGNORED, Batch, CachedFeatures, FeatureSource, Pixels, RowCollator
from lookonce.train.data.tokenize import Example
from lookonce.train.loop.arguments import training_arguments
from lookonce.train.loop.log_files import STOCK_PRINTERS
from lookonce.train.loop.session import make_trainer
from lookonce.train.model.frozen import check_frozen
from lookonce.train.model.load import PRECISIONS, add_lora, load_with_tower, load_without_tower

CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)
"""The name of the stock Trainer's setting, which has no other form; the second is that of transformers 5.17."""
PLAIN_ROWS = 4
"""Rows per forward pass of stock training, a common setting: more do not fit a GPU of 80 GB."""


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    name: str
    description: str
    mode: str | None
    """The run file's `batch.mode`; None for the stock Trainer's batches."""
    has_tower: bool
    package: str = ""
    """The package that must be installed for it."""
    frozen: Frozen | None = None
    """Its `train.frozen`, if not that of the run file."""

    @property
    def has_packs(self) -> bool:
        return self.mode in ("packed", "shared")


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain", "stock Trainer, padded rows, tower in every step", None, True),
        Variant("liger", "the same with Liger's kernels", None, True, "liger_kernel"),
        Variant("cached", "padded rows, features from the cache", "separate", False),
        Variant("tower", "packs, every question its own image, tower in every step", "packed", True),
        Variant("packed", "packs, every question its own image, from the cache", "packed", False),
        Variant("shared", "packs, questions share their image, from the cache", "shared", False),
        Variant("fp8", "shared, frozen products in fp8", "shared", False, frozen="fp8"),
    )
}


def find_variants(names: Sequence[str]) -> list[Variant]:
    """The variants with these names; Liger's is last, because it replaces transformers' classes permanently.

    Raises:
        UsageError: a name is unknown, or what its variant needs is not installed, or the GPU cannot multiply in fp8.
    """
    for name in names:
        if name not in VARIANTS:
            raise UsageError(f"no training variant is named {name!r}; choose from {', '.join(VARIANTS)}")
        package = VARIANTS[name].package
        if package and importlib.util.find_spec(package) is None:
            raise UsageError(f"{name} needs {package}; install it with: pip install liger-kernel")
        check_frozen(VARIANTS[name].frozen or UNQUANTISED, "train.frozen")
    return sorted((VARIANTS[name] for name in names), key=lambda variant: variant.name == "liger")


def set_up(
    variant: Variant,
    opened: OpenRun,
    examples: Sequence[Example],
    num_steps: int,
    folder: Path,
    notify: Notify,
) -> tuple[Any, Any]:
    """A model with a new adapter, and a trainer of `num_steps` steps that saves nothing; `notify` gets its notes."""
    if variant.name == "liger":
        _patch_with_liger(opened.model_folder.family)
    opened = opened.changed(run=_run_of(variant, opened.run))
    run, model_folder = opened.run, opened.model_folder
    load = load_with_tower if variant.has_tower else load_without_tower
    model = load(model_folder, PRECISIONS[run.train.precision], run.model.attention, run.train.frozen)
    model = add_lora(model, model_folder, run.lora, run.train.seed)
    arguments: dict[str, Any] = {
        "max_steps": num_steps,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
    }
    if variant.mode is None:
        return model, _stock_trainer(opened, model, examples, folder, arguments)
    source: FeatureSource = CachedFeatures(opened.cache, int(run.train.host_cache_gb * 1e9))
    if variant.has_tower:
        source = Pixels(opened.processor, opened.images.path_of)
    settings = training_arguments(run, folder, **arguments)
    return model, make_trainer(opened, model, settings, examples, startup=Startup(notify), source=source)


def _patch_with_liger(family: Family) -> None:
    import liger_kernel.transformers

    patch = getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{family.model_type}", None)
    if patch is None:
        raise UsageError(f"the installed liger-kernel has no kernels for {family.name}; leave out the variant liger")
    patch()


def _run_of(variant: Variant, run: RunFile) -> RunFile:
    changes = {"mode": variant.mode, "samples_per_forward": PLAIN_ROWS} if variant.mode else {}
    train = run.train.model_copy(update={"frozen": variant.frozen} if variant.frozen else {})
    return run.model_copy(update={"batch": run.batch.model_copy(update=changes), "train": train})


def _stock_trainer(
    opened: OpenRun, model: Any, examples: Sequence[Example], folder: Path, arguments: dict[str, Any]
) -> Any:
    run = opened.run
    rows = min(PLAIN_ROWS, run.batch.samples_per_step)
    rows_of_all_ranks = rows * environment.num_ranks()
    settings = training_arguments(
        run,
        folder,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=max(run.batch.samples_per_step // rows_of_all_ranks, 1),
        dataloader_num_workers=_num_loader_workers(),
        dataloader_pin_memory=torch.cuda.is_available(),
        **arguments | {CHECKPOINTING: bool(run.train.gradient_checkpointing)},
    )
    pixels = Pixels(opened.processor, opened.images.path_of)
    collate = StockCollator(opened.row_collator(pixels))
    trainer = Trainer(model, settings, data_collator=collate, train_dataset=examples)
    for printer in STOCK_PRINTERS:
        trainer.remove_callback(printer)
    return trainer


def _num_loader_workers() -> int:
    return min(len(os.sched_getaffinity(0)) - 1, 8) if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class StockCollator:
    """Batches for transformers' models: with labels of whole rows, from which the model computes its own loss."""

    rows: RowCollator

    def __call__(self, examples: Sequence[Example]) -> Batch:
        batch = self.rows(examples)
        del batch["logits_to_keep"], batch["targets"], batch["weights"]
        length = batch["input_ids"].shape[1]
        flags = [torch.from_numpy(example.expanded(self.rows.image_token_id)[1]) for example in examples]
        supervised = torch.stack([pad(row, (0, length - len(row))) for row in flags])
        return batch | {"labels": torch.where(supervised, batch["input_ids"], IGNORED)}
