"""What a run trains on: steps, answers and tokens, from its records and without a GPU.

Design: the counts are those of training, by the code of `lookonce check` and of the sampler: records become examples,
and the packs of the first epoch give the tokens. Images that are not in the cache are read for their size. Runs with
the same records and the same section `batch` share one count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lookonce.checks.check import check_settings
from lookonce.checks.inputs import (
    CheckedImages,
    CheckedModel,
    CheckedRecords,
    check_context,
    check_images,
    check_model,
    check_records,
)
from lookonce.checks.report import Result
from lookonce.datasets.records import Record
from lookonce.errors import RecordsError
from lookonce.run.config import RunFile
from lookonce.train.data.sampler import Sampler
from lookonce.train.data.steps import num_steps
from lookonce.train.data.token_stats import TokenCounter
from lookonce.train.data.tokenize import Example
from lookonce.train.model.gpu_memory import measured_name, peak_gb


@dataclass(frozen=True)
class Workload:
    """The training of a run."""

    num_steps: int
    num_samples: int
    """Records that are trained on, over all epochs."""
    num_answers: int
    num_tokens: int
    """Tokens that go through the model, without padding."""
    gpu_gb: float | None
    """Peak memory by the documented measurements; None if such a model was not measured."""
    errors: tuple[str, ...] = ()
    """What would stop the run."""


def num_samples(run: RunFile, num_records: int) -> tuple[int, int]:
    """The steps of a training on this many records, and the samples in them."""
    per_step, in_epoch = run.batch.samples_per_step, num_steps(num_records, run.batch.samples_per_step)
    steps = run.train.steps or math.ceil(run.train.epochs * in_epoch)
    epochs, rest = divmod(steps, max(in_epoch, 1))
    return steps, epochs * num_records + min(rest * per_step, num_records)


def measure(run: RunFile) -> Workload:
    """Read the records of a run and count; what would stop it is among the errors."""
    records, of_records = check_records(run, None)
    model, of_model = check_model(run)
    images, of_images = check_images(run, records, model)
    of_context = check_context(run, records, images.keys)
    errors = _errors([*check_settings(run), *of_records, *of_model, *of_images, *of_context])
    kept = _kept(run, records, model.counter, images) if model.counter else []
    if not kept or model.counter is None:
        return Workload(0, 0, 0, 0, None, (*errors, *(() if errors else ("no record can be trained on",))))
    examples = [example for _, example in kept]
    sampler = Sampler.of(examples, model.counter.chat_tokenizer.image_token_id, run.batch, seed=run.train.seed)
    steps, samples = num_samples(run, len(examples))
    epochs = samples / len(examples)
    return Workload(
        steps,
        samples,
        round(epochs * sum(len(record.turns) for record, _ in kept)),
        round(epochs * sum(sampler.pack_lengths(0))),
        _gpu_gb(run, model),
        errors,
    )


def _kept(
    run: RunFile, records: CheckedRecords, counter: TokenCounter, images: CheckedImages
) -> list[tuple[Record, Example]]:
    """The records that are trained on, as examples; what is wrong with the others is said by `lookonce check`."""
    found, order = [], run.batch.lesson_order
    for record in records.by_split["train"]:
        try:
            keys = [images.keys.get(path, str(path)) for path in record.images]
            example = counter.example(record, keys, [images.tokens.get(path, 0) for path in record.images])
        except RecordsError:
            continue
        if example.num_tokens <= run.batch.longest_record:
            found.append((record, replace(example, lesson=order.find(record) or 0) if order else example))
    return found


def _gpu_gb(run: RunFile, model: CheckedModel) -> float | None:
    name = measured_name(run.model.path, model.model_folder.config if model.model_folder else None)
    if name is None or not run.batch.has_packs:
        return None
    return peak_gb(name, run.batch.tokens_per_pack, run.train.gradient_checkpointing, run.train.frozen)


def _errors(results: list[Result]) -> tuple[str, ...]:
    return tuple(f"{one.what}: {one.value}" for one in results if one.level == "error")
