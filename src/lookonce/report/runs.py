"""The runs of a report, with all that is known of them: answers, scores, records, curves, and what they cost.

Design: everything is read from the files of the run folder, each of which may be absent, because a run may be
unfinished or of an earlier version. Image keys come from the plan of the run's cache. Without the plan images are
compared by their paths, which does not find a copy under another name.

Nothing of the cost is estimated. GPU hours count the GPUs that the training could use, since their number is recorded
and that of its processes is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookonce.cache.store.fingerprint import FOLDER_DIGITS
from lookonce.cache.store.metadata import read_plan
from lookonce.datasets.images import ImageIndex
from lookonce.datasets.prepare.run import REPORT
from lookonce.datasets.records import Record
from lookonce.errors import LookonceError
from lookonce.eval.answers.files import AnsweringCost
from lookonce.eval.join import Run, check_splits, find_predictions, folder_at, is_file, read_file, short_names
from lookonce.eval.scores.metric import EXACT, OF_ALL, Headline, Scorer
from lookonce.eval.scores.metrics import BASELINES, Evaluation, read_metrics
from lookonce.eval.scores.prediction import GROUPINGS, MAX_GROUPS, Prediction
from lookonce.eval.statistics import clusters_of
from lookonce.files import read_object
from lookonce.run.config import RunFile
from lookonce.run.folder import AGAIN, Environment, RunFolder, read_form
from lookonce.run.log_file import Curves, Rewards, read_curves, read_lines, read_rewards
from lookonce.run.records import read_splits, without_fold
from lookonce.status import TrainingPhase, find_training
from lookonce.summary import Summary
from lookonce.text import first_line


@dataclass(frozen=True)
class SplitFacts:
    num_records: int
    num_questions: int
    num_images: int
    """Distinct images, by their keys where these are known."""


@dataclass(frozen=True)
class DataFacts:
    splits: Mapping[str, SplitFacts] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    """The keys and the paths of the images of the training records."""
    has_keys: bool = False
    """Whether the keys of the training images are known."""
    problem: str = ""
    """Why nothing is known of the records."""
    prepared: Mapping[str, Any] = field(default_factory=dict)
    """The report of `lookonce data prepare` beside the training records."""

    @classmethod
    def of(cls, run: RunFile, records: Mapping[str, Sequence[Record]], key_of: Mapping[Path, str]) -> DataFacts:
        trained_on = {path for record in records["train"] for path in record.images}
        keys = {key_of[path] for path in trained_on if path in key_of}
        return cls(
            splits={
                split: SplitFacts(
                    num_records=len(split_records),
                    num_questions=sum(len(record.turns) for record in split_records),
                    num_images=len({key_of.get(path, path) for record in split_records for path in record.images}),
                )
                for split, split_records in records.items()
                if split_records
            },
            seen=frozenset(keys | set(map(str, trained_on))),
            has_keys=all(path in key_of for path in trained_on),
            prepared=read_object(run.data.train[0].parent / REPORT),
        )

    @classmethod
    def read(cls, run: RunFile, fingerprint: str) -> DataFacts:
        """Read the records, and the image keys from the plan of the cache with this fingerprint."""
        try:
            planned = read_plan(run.cache.dir / fingerprint[:FOLDER_DIGITS]).files() if fingerprint else {}
            images = ImageIndex({Path(path): key for path, (key, _) in planned.items()}, {})
            records = without_fold(run, read_splits(run), images)
        except (LookonceError, OSError) as error:
            return cls(problem=first_line(error))
        return cls.of(run, records, images.key_of)

    def is_seen(self, prediction: Prediction) -> bool:
        return not self.seen.isdisjoint((*prediction.image_keys, *prediction.images))


def overlap(predictions: Sequence[Prediction], facts: DataFacts) -> dict[str, Any]:
    """How many questions and images of a split training has seen, and the exact match of all others."""
    seen = [row for row in predictions if facts.is_seen(row)]
    unseen = [row for row in predictions if not facts.is_seen(row)]
    return {
        "num_questions": len(seen),
        "num_images": len({row.sources for row in seen}),
        "exact_match_of_others": sum(row.is_right for row in unseen) / len(unseen) if unseen else None,
        "by_content": facts.has_keys and all(row.image_keys or not row.images for row in predictions),
    }


@dataclass(frozen=True)
class RunScores:
    overall: Headline
    num_images: int
    """Images; those that share a question count as one."""
    groups: dict[str, dict[str, Headline]]
    """The groups with most questions by grouping, by name."""
    num_groups: dict[str, int]
    """All groups of each grouping."""


def score_run(predictions: Sequence[Prediction], metric: str = EXACT) -> RunScores:
    """Score the answers of a run, all and by group, by a metric; questions to which it does not apply are in none."""
    clusters = clusters_of([row.sources for row in predictions])
    scorer = Scorer(predictions, metric)
    clusters_Q, rows = clusters[scorer.numbers], scorer.rows
    model_Q, majority_Q = (scorer([getattr(row, name) for row in predictions]) for name in ("predicted", "majority"))

    def scored(chosen: NDArray[np.intp]) -> Headline:
        if metric not in OF_ALL:
            return Headline.of(metric, model_Q[chosen], majority_Q[chosen], clusters_Q[chosen])
        group = [rows[number] for number in chosen]  # whose figure is not the mean of their shares in that of all
        of_group = Scorer(group, metric)
        model, majority = ([getattr(row, name) for row in group] for name in ("predicted", "majority"))
        return Headline.of(metric, of_group(model), of_group(majority), clusters_Q[chosen])

    groups, num_groups = {}, {}
    for by in GROUPINGS:
        names = [getattr(row, by) for row in rows]
        sizes = Counter(name for name in names if name is not None)
        largest = [name for name, _ in sizes.most_common(MAX_GROUPS)]
        groups[by] = {group: scored(np.flatnonzero([name == group for name in names])) for group in largest}
        num_groups[by] = len(sizes)
    overall = Headline.of(metric, model_Q, majority_Q, clusters_Q)
    return RunScores(overall, len(np.unique(clusters_Q)), groups, num_groups)


@dataclass(frozen=True)
class ReportedRun:
    name: str
    split: str
    """The split whose answers are reported; empty for a predictions file outside a run folder."""
    answers: Run | None
    """None if the split is not evaluated."""
    folder: RunFolder | None
    settings: RunFile | None
    known_data: DataFacts | None = None
    """What a training that has just ended knows of its records; otherwise they are read."""
    known_summary: dict[str, Any] | None = None
    known_metrics: dict[str, Any] | None = None
    """The evaluation beside another majority baseline than that of the run's own records; otherwise it is read."""

    @property
    def has_context(self) -> bool:
        """Whether its questions follow answers to earlier ones (`data.context`), and are those of a split."""
        data = self.settings.data if self.settings else None
        return data is not None and data.context is not None and hasattr(data, self.split)

    @cached_property
    def scores(self) -> RunScores | None:
        return score_run(self.answers.predictions, self.answers.metric) if self.answers else None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The evaluation of the answers as JSON; computed again if it was written by an earlier version, or another
        metric counts now."""
        if self.known_metrics is not None:
            return self.known_metrics
        written = read_metrics(self.folder, self.split) if self.folder else {}
        if self.answers is None:
            return written
        if "baselines" in written and written["headline"]["metric"] == self.answers.metric:
            return written
        return Evaluation.of(self.answers.predictions, metric=self.answers.metric).to_json()

    @cached_property
    def conditions(self) -> dict[str, dict[str, Any]]:
        """The metrics of the baselines that a model has answered, by their keys."""
        if self.folder is None:
            return {}
        evaluated = [key for key in BASELINES if key in self.metrics.get("baselines", {})]
        return {key: read_metrics(self.folder, f"{self.split}-{key}") for key in evaluated}

    @cached_property
    def curves(self) -> Curves:
        """What the training has logged, without values that are not finite, which have no place in a plot."""
        logged = vars(read_curves(self.folder.log)) if self.folder else {}
        return Curves(*({step: value for step, value in curve.items() if isfinite(value)} for curve in logged.values()))

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        return list(read_lines(self.folder.log)) if self.folder else []

    @cached_property
    def rewards(self) -> Rewards | None:
        """The figures of a training by rewards; None of another one."""
        return read_rewards(self.folder.log) if self.folder else None

    @cached_property
    def summary(self) -> dict[str, Any]:
        if self.known_summary or not (self.folder and self.folder.is_finished):
            return self.known_summary or {}
        return Summary.read(self.folder).to_json()

    @cached_property
    def trained(self) -> dict[str, Any]:
        return asdict(self.folder.read_trained()) if self.folder and self.folder.trained.exists() else {}

    @property
    def was_trained_elsewhere(self) -> bool:
        return bool(self.trained.get("elsewhere"))

    @cached_property
    def training(self) -> TrainingPhase | None:
        """How far the training is; None without a run folder, or if it is this process that has just trained."""
        if self.folder is None or self.settings is None or self.known_summary:
            return None
        return find_training(self.folder, self.settings.cache.claim_s)

    @cached_property
    def answering(self) -> dict[str, Any]:
        return asdict(AnsweringCost.read(self.folder.answering(self.split))) if self.folder else {}

    @cached_property
    def environment(self) -> dict[str, Any]:
        if not (self.folder and (path := self.folder.folder / "environment.json").exists()):
            return {}
        return asdict(read_form(path, Environment, AGAIN))

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return self.folder.recorded_inputs() if self.folder else {}

    @cached_property
    def data(self) -> DataFacts:
        if self.known_data:
            return self.known_data
        return DataFacts.read(self.settings, str(self.inputs.get("cache", ""))) if self.settings else DataFacts()


OF_TRAINING = ("startup_seconds", "first_step", "num_steps", "num_samples", "wait_share")
"""Figures of the training that are part of its cost."""


@dataclass(frozen=True)
class Cost:
    """What a run cost; None where it is not recorded."""

    startup_seconds: dict[str, float]
    cache_seconds: float | None
    """Encoding of the cache, all workers together."""
    training_seconds: float | None
    first_step: int
    answering_seconds: float | None
    num_answered: int
    num_gpus: int | None
    gpu_hours: float | None
    """Hours of training and answering on GPUs; None on a CPU."""
    memory_gb: float | None
    """The most that PyTorch reserved on a GPU."""
    num_steps: int | None
    num_samples: int | None
    ms_per_sample: float | None
    tokens_per_second: float | None
    """The median of the log."""
    rewards: Rewards | None
    wait_share: float | None
    cache_bytes: int | None
    adapter_bytes: int | None

    @classmethod
    def of(cls, run: ReportedRun) -> Cost:
        trained: dict[str, Any] = dict.fromkeys(OF_TRAINING) | {"startup_seconds": {}, "first_step": 0} | run.trained
        summary, answering = run.summary, run.answering
        gpus, seconds, samples = run.environment.get("gpus"), trained.get("seconds"), trained.get("num_samples")
        busy = (seconds or 0) + (answering.get("seconds") or 0)
        rates = [line["tokens_per_second"] for line in run.log if line.get("tokens_per_second")]
        adapter = [*run.folder.adapter.iterdir()] if run.folder and run.folder.adapter.is_dir() else None
        return cls(
            cache_seconds=summary.get("encode_seconds"),
            training_seconds=seconds,
            answering_seconds=answering.get("seconds") if answering.get("num_answered") else None,
            num_answered=answering.get("num_answered", 0),
            num_gpus=None if gpus is None else len(gpus),
            gpu_hours=len(gpus) * busy / 3600 if gpus and busy else None,
            memory_gb=max((line["memory_gb"] for line in run.log if line.get("memory_gb")), default=None),
            ms_per_sample=1e3 * seconds / samples if seconds and samples and not trained["first_step"] else None,
            tokens_per_second=median(rates) if rates else None,
            rewards=run.rewards,
            cache_bytes=summary.get("cache_bytes"),
            adapter_bytes=None if adapter is None else sum(path.stat().st_size for path in adapter),
            **{name: trained[name] for name in OF_TRAINING},
        )


def open_runs(paths: Sequence[Path], split: str | None = None) -> list[ReportedRun]:
    """The runs at some paths: run folders, run files, or predictions files. `split` is by default their `eval.split`.

    Raises:
        UsageError: the runs' own splits differ, or the predictions of a split that is named do not exist.
        LookonceError: a path is none of these, or predictions are damaged.
    """
    opened = [_open(path, name, split) for path, name in zip(paths, short_names(paths), strict=True)]
    check_splits({run.name: run.split for path, run in zip(paths, opened, strict=True) if not is_file(path)})
    return opened


def _open(path: Path, name: str, split: str | None) -> ReportedRun:
    folder = folder_at(path)
    settings = folder.read_run() if folder else None
    chosen = path.stem if is_file(path) else split or (settings.eval.split if settings else "")
    file = path
    if folder and not is_file(path):
        file = find_predictions(folder, chosen) if split else folder.predictions(chosen)
    answers = read_file(name, file, folder) if file is path or file.exists() else None
    return ReportedRun(name, chosen if folder else "", answers, folder, settings)
