"""What a run works with: its inputs, the opened cache, and what makes batches and a trainer of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.records import Record
from lookonce.run.config import BatchSection, RunFile
from lookonce.run.inputs import Inputs
from lookonce.text import Notify
from lookonce.train.data.batches import Feed
from lookonce.train.data.collate_rows import Collator
from lookonce.train.data.features import CachedFeatures, VisionSource
from lookonce.train.data.tokenize import Example, Prompter, make_examples
from lookonce.train.loop.metrics_log import STOCK_PRINTERS
from lookonce.train.loop.trainer import RunTrainer
from lookonce.train.loop.warmup import WarmUp


@dataclass(frozen=True)
class Session:
    """Inputs, the opened cache, and what turns records into batches."""

    inputs: Inputs
    cache: VisionCache
    prompter: Prompter
    collator: Collator

    @classmethod
    def open(cls, inputs: Inputs) -> Session:
        cache = inputs.open_cache()
        prompter = Prompter(inputs.model_folder.folder, inputs.model_folder.config)
        collator = Collator(CachedFeatures(cache), prompter.image_token_id, prompter.tokenizer.pad_token_id)
        return cls(inputs, cache, prompter, collator)

    def examples(self, split: str) -> tuple[list[Example], int]:
        """Training examples of a split and how many records were too long."""
        records, max_tokens = self.inputs.records[split], self.inputs.run.batch.longest_record
        return make_examples(self.prompter, records, self.inputs.key_of, self.cache.grid_thw, max_tokens, split)

    def question(self, record: Record, turn: int) -> Example:
        keys = [self.inputs.key_of(path) for path in record.images]
        return self.prompter.question(record, turn, keys, [self.cache.grid_thw(key) for key in keys])


def make_trainer(
    session: Session,
    model: Any,
    arguments: TrainingArguments,
    examples: Sequence[Example],
    held_out: Sequence[Example] = (),
    callbacks: Sequence[Any] = (),
    vision: VisionSource | None = None,
    notify: Notify = lambda text: None,
) -> RunTrainer:
    """A trainer of a model on examples, validated with those `held_out`, that prints nothing by itself.

    Images come from the session's cache, or from `vision`. `notify` gets notes for a person.
    """
    options = session.inputs.run
    vision = vision or CachedFeatures(session.cache, int(options.train.host_cache_gb * 1e9))
    whole = options.batch.model_copy(update={"samples_per_step": max(len(held_out), 1), "order": "as_given"})
    ranks = {"rank": arguments.process_index, "num_ranks": arguments.world_size}

    def feed(examples: Sequence[Example], batch: BatchSection) -> Feed:
        return Feed.of(examples, session.prompter, vision, batch, arguments.device, options.train.seed, **ranks)

    trainer = RunTrainer(
        model,
        arguments,
        feed(examples, options.batch),
        feed(held_out, whole) if held_out else None,
        options.train.prefetch,
        callbacks,
        uses_graphs=can_record(options, arguments, vision),
    )
    for printer in STOCK_PRINTERS:
        trainer.remove_callback(printer)
    trainer.add_callback(WarmUp(trainer, notify))
    return trainer


def can_record(run: RunFile, arguments: TrainingArguments, vision: VisionSource) -> bool:
    """Whether the passes over packs of one shape are the same work each time, and the GPU's alone.

    They are not with a tower, whose shapes are those of its images; and what checkpointing keeps of random states, the
    scaling of losses in half precision and weights that are spread over GPUs are the CPU's work too.
    """
    options, spread = run.train, run.train.fsdp and arguments.world_size > 1
    fits = run.batch.has_packs and not (vision.has_tower or options.gradient_checkpointing or arguments.fp16 or spread)
    return options.cuda_graphs and arguments.device.type == "cuda" and fits
