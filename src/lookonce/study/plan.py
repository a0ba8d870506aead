"""`lookonce study plan`: what a study will cost, before anything is spent.

Design: steps, answers and tokens are counted as in training and without a GPU, by the code of `lookonce check` and of
the sampler: records become examples, and the packs of the first epoch give the tokens. Images that are not in the cache
are read for their size. Runs with the same records and the same section `batch` share one count. Nothing is written.

Time needs a measured rate: that of an arm of which a run has been trained, or one that the user gives for the first
arm. Arms without a rate of their own get that of another one, by their tokens a sample. It is the time of training
alone: what precedes the first step and the answers afterwards are not in it. The time of all follows from the order in
which `study run` starts the runs.

Answers that other runs must give first are counted as if they were the true ones, which are about as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from lookonce.datasets.records import Record
from lookonce.errors import LookonceError, RecordsError, UsageError
from lookonce.run.config import RunFile
from lookonce.run.folder import TrainedElsewhere
from lookonce.study.file import StudyRun, expand, read_study
from lookonce.study.pool import Job, schedule
from lookonce.study.state import RoutedRun, find_outdated, in_chains, read_state, routed_runs
from lookonce.text import count, duration, listed, rows, table
from lookonce.train.data.sampler import Sampler, num_steps
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
    results = [*check_settings(run), *of_records, *of_model, *of_images, *of_context]
    errors = tuple(f"{one.what}: {one.value}" for one in results if one.level == "error")
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
    found, order = [], run.batch.stage_order
    for record in records.by_split["train"]:
        try:
            keys = [images.keys.get(path, str(path)) for path in record.images]
            example = counter.example(record, keys, [images.tokens.get(path, 0) for path in record.images])
        except RecordsError:
            continue
        if example.num_tokens <= run.batch.longest_record:
            found.append((record, replace(example, stage=order.find(record) or 0) if order else example))
    return found


def _gpu_gb(run: RunFile, model: CheckedModel) -> float | None:
    name = measured_name(run.model.path, model.model_folder.config if model.model_folder else None)
    if name is None or not run.batch.has_packs:
        return None
    return peak_gb(name, run.batch.tokens_per_pack, run.train.gradient_checkpointing, run.train.frozen)


HEADER = ("arm", "runs left", "steps", "answers", "tokens", "GPU memory", "time a run")
MOST = 20
"""Runs of the order that are named."""


@dataclass(frozen=True)
class ArmPlan:
    """What the runs of an arm cost, each."""

    arm: str
    starts_from: str | None
    answers_of: list[str]
    num_runs: int
    num_left: int
    """Runs that are not complete."""
    workload: Workload
    seconds: float | None
    """How long a run trains; None without a measured rate."""

    def row(self) -> tuple[str, ...]:
        one = self.workload
        memory = "not measured" if one.gpu_gb is None else f"{one.gpu_gb:.0f} GB"
        needs = [*filter(None, [self.starts_from]), *self.answers_of]
        name = f"{self.arm} (after {listed(needs)})" if needs else self.arm
        figures = (f"{number:,}" for number in (one.num_steps, one.num_answers, one.num_tokens))
        runs = f"{self.num_left} of {self.num_runs}"
        return name, runs, *figures, memory, "no rate" if self.seconds is None else duration(self.seconds)


@dataclass(frozen=True)
class Plan:
    """The runs of a study that are left, and what they cost."""

    arms: list[ArmPlan]
    num_parallel: int
    order: list[str]
    """The runs that are left, in the order in which they start."""
    seconds: float | None
    """How long all of them take, `num_parallel` at a time; None without a measured rate."""
    outdated: dict[str, str]
    wrong_routes: list[str]
    """Routed arms that lack an arm for some questions."""

    @property
    def errors(self) -> list[str]:
        """What would stop runs, by arm."""
        return [f"{one.arm}: {error}" for one in self.arms for error in one.workload.errors] + self.wrong_routes

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"errors": self.errors}

    def text(self) -> str:
        blocks = [table(HEADER, [one.row() for one in self.arms]), rows(self._totals())]
        blocks += ["\n".join(f"{name} is outdated: {reason}" for name, reason in self.outdated.items())]
        blocks += ["\n".join(f"error: {error}" for error in self.errors)]
        return "\n\n".join(filter(None, blocks))

    def _totals(self) -> list[tuple[str, str]]:
        answers = sum(one.num_left * one.workload.num_answers for one in self.arms)
        tokens = sum(one.num_left * one.workload.num_tokens for one in self.arms)
        lines = [("left", f"{count(len(self.order), 'run')}, {answers:,} answers, {tokens:,} tokens")]
        if self.order:
            lines.append(("order", listed(self.order, MOST)))
        if self.seconds is not None:
            spent = sum(one.num_left * (one.seconds or 0) for one in self.arms)
            each = f"{self.num_parallel} at a time" if self.num_parallel > 1 else "one after another"
            lines.append(("time", f"{duration(self.seconds)} of training, {each}; {duration(spent)} of all together"))
        return lines


def plan_study(path: Path, num_parallel: int, given_ms: float | None) -> Plan:
    """Count what the runs of a study cost; `given_ms` is a rate of the first arm, in milliseconds a sample.

    Raises:
        LookonceError: the study file or a run file is wrong, or the record of a run is broken.
    """
    study = read_study(path)
    runs = expand(study)
    outdated = find_outdated(runs)
    left = [one for one in in_chains(runs) if one.name in outdated or not read_state(one).is_complete]
    workloads = _measure_all(runs)
    rates = ({next(iter(workloads)): given_ms} if given_ms else {}) | _rates(runs, workloads)
    arms = [
        ArmPlan(
            arm,
            study.arms[arm].starts_from,
            study.arms[arm].answers_of,
            len(study.seeds),
            sum(one.arm == arm for one in left),
            workload,
            _seconds(arm, workloads, rates),
        )
        for arm, workload in workloads.items()
    ]
    times = _times(left, {one.arm: one for one in arms}, num_parallel)
    knows_all = all(one.seconds is not None for one in arms if one.num_left)
    total = max((end for _, end in times.values()), default=0.0)
    wrong_routes = _wrong_routes(routed_runs(study, runs).values())
    return Plan(arms, num_parallel, list(times), total if knows_all else None, outdated, wrong_routes)


def _wrong_routes(routed: Iterable[RoutedRun]) -> list[str]:
    found = []
    for one in {one.arm: one for one in routed}.values():
        try:
            one.check()
        except UsageError as error:
            found.append(str(error))
        except LookonceError:
            continue  # records that cannot be read are errors of the arms
    return found


def _measure_all(runs: Mapping[str, StudyRun]) -> dict[str, Workload]:
    """The workload of each arm, measured once for all arms that train on the same."""
    found: dict[str, Workload] = {}
    by_arm: dict[str, Workload] = {}
    for one in runs.values():
        if one.arm not in by_arm:
            run = _countable(one)
            # All that a workload follows from; the run to start from and paths to write to are not among it.
            key = run.model_dump_json(exclude={"output": True, "eval": True, "train": {"start_from", "learning_rate"}})
            found[key] = found.get(key) or measure(run)
            by_arm[one.arm] = found[key]
    return by_arm


def _countable(one: StudyRun) -> RunFile:
    """The run; with true answers if those in its contexts are other runs', which may not have answered yet."""
    data = one.run.data
    if not (one.answers_of and data.context):
        return one.run
    context = data.context.model_copy(update={"answers": "true"})
    return one.run.model_copy(update={"data": data.model_copy(update={"context": context})})


def _rates(runs: Mapping[str, StudyRun], workloads: Mapping[str, Workload]) -> dict[str, float]:
    """Milliseconds a sample of the arms that have been trained; of several seeds the slowest."""
    found: dict[str, float] = {}
    for one in runs.values():
        if one.folder.trained.exists() and workloads[one.arm].num_samples:
            trained = one.folder.read_trained()
            if isinstance(trained, TrainedElsewhere):
                continue
            num_samples = trained.num_samples - trained.first_step * one.run.batch.samples_per_step
            if num_samples > 0:
                found[one.arm] = max(1000 * trained.seconds / num_samples, found.get(one.arm, 0.0))
    return found


def _seconds(arm: str, workloads: Mapping[str, Workload], rates: Mapping[str, float]) -> float | None:
    """How long a run of an arm trains, by its own rate or by that of another arm; None without any."""
    workload, known = workloads[arm], arm if arm in rates else next(iter(rates), None)
    if known is None:
        return None
    tokens, other = (workloads[name].num_tokens / max(workloads[name].num_samples, 1) for name in (arm, known))
    return rates[known] * workload.num_samples / 1000 * tokens / max(other, 1)


def _times(left: list[StudyRun], arms: Mapping[str, ArmPlan], num_parallel: int) -> Mapping[str, tuple[float, float]]:
    """When each run begins and ends, in the order of `study run`; 0 where no time is known."""
    names = {one.name for one in left}
    jobs = [
        Job(
            one.name,
            (),
            one.log,
            arms[one.arm].workload.num_samples,
            tuple(name for name in one.needs if name in names),
        )
        for one in left
    ]
    return schedule(jobs, {one.name: arms[one.arm].seconds or 0 for one in left}, num_parallel)
