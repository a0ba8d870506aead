"""`lookonce study plan`: what a study will cost, before anything is spent.

Steps, answers and tokens are counted without a GPU by the code of training: records become examples, and the packs of
the first epoch give the tokens. Images that are not in the cache are read for their size. Answers that other runs must
give first are counted as if they were the reference answers. Nothing is written.

Time is that from the first step to the last. It needs a measured rate: that of a variant of which a run has been
trained, or one that the user gives for the first variant. Variants without a rate of their own get that of another one,
by their tokens a sample; one that draws its answers (`train.objective: grpo`) gets none.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lookonce.checks.check import check_settings
from lookonce.checks.inputs import (
    CheckedImages,
    CheckedRecords,
    answer_lengths,
    check_context,
    check_images,
    check_model,
    check_records,
)
from lookonce.datasets.records import Record
from lookonce.errors import LookonceError, RecordsError, UsageError
from lookonce.run.config import RunFile
from lookonce.run.folder import TrainedElsewhere
from lookonce.study.file import StudyRun, expand, read_study
from lookonce.study.state import RoutedRun, find_outdated, read_state, routed_runs
from lookonce.text import count, duration, listed, table
from lookonce.train.data.sampler import Sampler, num_steps
from lookonce.train.data.token_stats import TokenCounter
from lookonce.train.data.tokenize import Example


@dataclass(frozen=True)
class Workload:
    num_steps: int
    num_samples: int
    """Records that are trained on, over all epochs; in a training by rewards its questions."""
    num_answers: int
    num_tokens: int | None
    """Tokens that go through the model, without padding; None if the answers are drawn."""
    errors: tuple[str, ...] = ()


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
    results = [*check_settings(run), *of_records, *of_model, *of_images, *of_context]
    errors = tuple(f"{result.what}: {result.value}" for result in results if result.level == "error")
    draws = run.train.objective == "grpo"
    if draws and model.counter and (num_asked := _num_questions(run, records, model.counter, images)):
        steps, samples = num_samples(run, num_asked)
        num_drawn = round(samples * math.ceil(steps / run.grpo.iterations) / max(steps, 1))
        return Workload(steps, samples, num_drawn * run.grpo.samples, None, errors)
    kept = _usable_examples(run, records, model.counter, images) if model.counter and not draws else []
    if not kept or model.counter is None:
        return Workload(0, 0, 0, 0, (*errors, *(() if errors else ("no record can be trained on",))))
    examples = [example for _, example in kept]
    sampler = Sampler.of(examples, model.counter.chat_tokenizer.image_token_id, run.batch, seed=run.train.seed)
    steps, samples = num_samples(run, len(examples))
    epochs = samples / len(examples)
    return Workload(
        steps,
        samples,
        round(epochs * sum(len(record.turns) for record, _ in kept)),
        round(epochs * sum(sampler.pack_lengths(0))),
        errors,
    )


def _usable_examples(
    run: RunFile, records: CheckedRecords, counter: TokenCounter, images: CheckedImages
) -> list[tuple[Record, Example]]:
    """The records that are trained on, as examples; `lookonce check` names what is wrong with the others."""
    kept, order = [], run.batch.stage_order
    for record in records.by_split["train"]:
        try:
            keys = [images.keys.get(path, str(path)) for path in record.images]
            example = counter.example(record, keys, [images.tokens.get(path, 0) for path in record.images])
        except RecordsError:
            continue
        if example.num_tokens <= run.batch.longest_record:
            kept.append((record, replace(example, stage=order.find(record) or 0) if order else example))
    return kept


def _num_questions(run: RunFile, records: CheckedRecords, counter: TokenCounter, images: CheckedImages) -> int:
    """The questions to which a training by rewards draws answers."""
    lengths: list[int] = []
    for record in records.by_split["train"]:
        with contextlib.suppress(RecordsError):
            lengths += answer_lengths(run, record, counter, [images.tokens.get(path, 0) for path in record.images])
    return sum(length <= run.batch.longest_record for length in lengths)


HEADER = ("variant", "runs left", "steps", "answers", "tokens", "time a run")


@dataclass(frozen=True)
class VariantPlan:
    """What the runs of a variant cost, each."""

    variant: str
    starts_from: str | None
    answers_of: list[str]
    num_runs: int
    num_left: int
    """Runs that are not complete."""
    workload: Workload
    seconds: float | None
    """How long a run trains; None without a measured rate."""

    def row(self) -> tuple[str, ...]:
        workload = self.workload
        needs = [*filter(None, [self.starts_from]), *self.answers_of]
        name = f"{self.variant} (after {listed(needs)})" if needs else self.variant
        counted = (workload.num_steps, workload.num_answers, workload.num_tokens)
        figures = ("unknown" if number is None else f"{number:,}" for number in counted)
        runs = f"{self.num_left} of {self.num_runs}"
        return name, runs, *figures, "unknown" if self.seconds is None else duration(self.seconds)


@dataclass(frozen=True)
class Plan:
    """What the runs of a study cost."""

    variants: list[VariantPlan]
    outdated: dict[str, str]
    wrong_routes: list[str]
    """Routed variants that lack a variant for some questions."""

    @property
    def errors(self) -> list[str]:
        """What would stop runs, by variant."""
        errors = [f"{variant.variant}: {error}" for variant in self.variants for error in variant.workload.errors]
        return errors + self.wrong_routes

    @property
    def seconds(self) -> float | None:
        """How long all runs that are left train together; None without a measured rate."""
        times = [(variant.num_left, variant.seconds) for variant in self.variants if variant.num_left]
        known_times = [number * seconds for number, seconds in times if seconds is not None]
        return sum(known_times) if len(known_times) == len(times) else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"errors": self.errors, "seconds": self.seconds}

    def text(self) -> str:
        blocks = [table(HEADER, [variant.row() for variant in self.variants]), f"left: {self._left_text()}"]
        blocks += ["\n".join(f"{name} is outdated: {reason}" for name, reason in self.outdated.items())]
        blocks += ["\n".join(f"error: {error}" for error in self.errors)]
        return "\n\n".join(filter(None, blocks))

    def _left_text(self) -> str:
        left = [(variant.num_left, variant.workload) for variant in self.variants]
        answers, tokens = (
            sum(number * (getattr(workload, name) or 0) for number, workload in left)
            for name in ("num_answers", "num_tokens")
        )
        counted = f"{count(sum(number for number, _ in left), 'run')}, {answers:,} answers, {tokens:,} tokens"
        if any(number and workload.num_tokens is None for number, workload in left):
            counted += " without those of drawn answers"
        if self.seconds is None:
            return f"{counted}; for times, train one run, or give --rate (milliseconds per sample)"
        return f"{counted}; {duration(self.seconds)} of training on one GPU"


def plan_study(path: Path, given_ms: float | None = None) -> Plan:
    """Count what the runs of a study cost; `given_ms` is a rate of the first variant, in milliseconds a sample.

    Raises:
        LookonceError: the study file or a run file is wrong, or the record of a run is broken.
    """
    study = read_study(path)
    runs = expand(study)
    outdated = find_outdated(runs)
    left = [run.variant for run in runs.values() if run.name in outdated or not read_state(run).is_complete]
    workloads = _measure_all(runs)
    rates = ({next(iter(workloads)): given_ms} if given_ms else {}) | _rates(runs, workloads)
    variants = [
        VariantPlan(
            name,
            study.variants[name].starts_from,
            study.variants[name].answers_of,
            len(study.seeds),
            left.count(name),
            workload,
            _seconds(name, workloads, rates),
        )
        for name, workload in workloads.items()
    ]
    return Plan(variants, outdated, _wrong_routes(routed_runs(study, runs).values()))


def _wrong_routes(routed: Iterable[RoutedRun]) -> list[str]:
    problems = []
    for routed_run in {routed_run.variant: routed_run for routed_run in routed}.values():
        try:
            routed_run.check()
        except UsageError as error:
            problems.append(str(error))
        except LookonceError:
            continue  # records that cannot be read are errors of the variants
    return problems


def _measure_all(runs: Mapping[str, StudyRun]) -> dict[str, Workload]:
    """The workload of each variant, measured once for all variants that train on the same."""
    by_key: dict[str, Workload] = {}
    by_variant: dict[str, Workload] = {}
    for run in runs.values():
        if run.variant not in by_variant:
            settings = _countable(run)
            # All that a workload follows from; the run to start from and paths to write to are not among it.
            key = settings.model_dump_json(
                exclude={"output": True, "eval": True, "train": {"start_from", "learning_rate"}}
            )
            by_key[key] = by_key.get(key) or measure(settings)
            by_variant[run.variant] = by_key[key]
    return by_variant


def _countable(run: StudyRun) -> RunFile:
    """The run; with reference answers if those in its contexts are other runs', which may not have answered yet."""
    data = run.settings.data
    if not (run.answers_of and data.context):
        return run.settings
    context = data.context.model_copy(update={"answers": "reference"})
    return run.settings.model_copy(update={"data": data.model_copy(update={"context": context})})


def _rates(runs: Mapping[str, StudyRun], workloads: Mapping[str, Workload]) -> dict[str, float]:
    """Milliseconds a sample of the variants that have been trained; of several seeds the slowest."""
    rates: dict[str, float] = {}
    for run in runs.values():
        if run.folder.trained.exists() and workloads[run.variant].num_samples:
            trained = run.folder.read_trained()
            if isinstance(trained, TrainedElsewhere):
                continue
            num_samples = trained.num_samples - trained.first_step * run.settings.batch.samples_per_step
            if num_samples > 0:
                rates[run.variant] = max(1000 * trained.seconds / num_samples, rates.get(run.variant, 0.0))
    return rates


def _seconds(variant: str, workloads: Mapping[str, Workload], rates: Mapping[str, float]) -> float | None:
    """How long a run of a variant trains, by its own rate or by that of another variant; None without any."""
    workload, counted = workloads[variant], workloads[variant].num_tokens
    if variant in rates:
        return rates[variant] * workload.num_samples / 1000
    for name, rate in rates.items():
        if (tokens := workloads[name].num_tokens) is not None and counted is not None:
            of_each, of_other = counted / max(workload.num_samples, 1), tokens / max(workloads[name].num_samples, 1)
            return rate * workload.num_samples / 1000 * of_each / max(of_other, 1)
    return None
