"""The study file: a base run file, variants that change it, seeds, and which variants are compared; and its runs.

    base: experiments/sample.yaml
    seeds: [42, 43]
    output: runs/study
    variants:
      plain:
      classic: {batch.questions_per_image: 1}
      longer: {starts_from: plain, train.epochs: 2}
      best-of-both: {route: {by: stage, variants: {1: plain, 2: longer}}}
      half-1: {data.held_out: {fold: 1, of: 2}}
      half-2: {data.held_out: {fold: 2, of: 2}}
      staged: {answers_of: [half-1, half-2], data.context: {by: stage, order: [1, 2]}}

A variant says what `--set` says on the command line, so that the run file stays the only place where keys have a
meaning. All mistakes of the file are named at once. The runs are variants times seeds, each an ordinary run file with a
run folder of its own. Run files are written again whenever the study runs; the record of what was trained is in the run
folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from lookonce.datasets.curriculum import as_text
from lookonce.errors import UsageError
from lookonce.eval.join import Label
from lookonce.files import write_text
from lookonce.run.config import RunFile, read_run_file, with_absolute_paths
from lookonce.run.folder import RunFolder
from lookonce.run.records import HELD_OUT
from lookonce.run.sections import UserPath
from lookonce.run.start_adapter import shape_differences
from lookonce.settings import Section, Seed, read_settings
from lookonce.text import count, listed, shown

STARTS_FROM, ANSWERS_OF, ROUTE = "starts_from", "answers_of", "route"
START_KEY, ANSWERS_KEY = "train.start_from", "data.context.answers"
SET_BY = {START_KEY: STARTS_FROM, ANSWERS_KEY: ANSWERS_OF}
"""Keys of a run that name other runs, and the key of a variant that names variants instead."""
OWN_KEYS = {"train.seed": "seeds", "output": "output", "eval.split": "evaluate"}
"""Keys of a run that a study sets for all variants, and the key of the study file for each."""

RUN_FILES, LOGS = "run-files", "logs"
"""Folders in the output folder of a study, beside those of the runs."""
PAGE = "report.html"
"""The page in the output folder of a study, unless another is named."""
MAX_RUNS = 1000
"""The most runs of a study: they are all read, planned and compared at once."""
VariantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class RouteSection(Section):
    """Which variant's adapter answers which questions."""

    by: Label = "stage"
    """The label of a question that decides."""
    variants: Annotated[
        dict[Annotated[str, BeforeValidator(as_text)], VariantName], Field(min_length=1, max_length=MAX_RUNS)
    ]
    """The variant for each value of the label."""


class VariantSection(Section):
    """A variant: the base run file with changes; or, with `route`, the answers of other variants."""

    starts_from: VariantName | None = None
    """The variant with whose adapter of the same seed this one starts; by default a new adapter."""
    answers_of: Annotated[list[VariantName], Field(min_length=2, max_length=MAX_RUNS)] = []
    """The variants whose answers the contexts of training and validation records have, with the same seed. Each leaves
    out another fold of the images, so no answer is of a model that was trained on the image."""
    route: RouteSection | None = None
    """Trains nothing: each question has the answer of another variant with the same seed."""
    changes: dict[str, Any] = {}
    """Keys of the run file with their values: all keys of the variant but `starts_from`, `answers_of` and `route`."""

    @model_validator(mode="before")
    @classmethod
    def _keys_are_changes(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return {} if values is None else values
        sections = {name: values[name] for name in (STARTS_FROM, ANSWERS_OF, ROUTE) if name in values}
        return sections | {"changes": {name: value for name, value in values.items() if name not in sections}}

    @model_validator(mode="after")
    def _leaves_to_the_study(self) -> VariantSection:
        if self.route and (self.changes or self.needs):
            raise ValueError(f"a variant with `{ROUTE}` is not trained, so it takes no other key")
        for key in self.changes:
            if key in OWN_KEYS:
                raise ValueError(f"{key} is set for all variants; set `{OWN_KEYS[key]}` of the study file instead")
            if key == "eval.metric":
                raise ValueError("eval.metric: variants are compared by one metric; set it in the base run file")
            if "." not in key:  # a whole section would replace that of the base run file
                raise ValueError(f"{key}: name single keys of the run file, such as train.epochs, or {STARTS_FROM}")
        for key, section in SET_BY.items():
            if key in self.changes and getattr(self, section):
                raise ValueError(f"{section} names variants, and {key} other runs; use one of them")
        return self

    @property
    def needs(self) -> list[str]:
        """The variants that must have been trained, and have answered, before this one is trained."""
        return [*filter(None, [self.starts_from]), *self.answers_of]


class CompareSection(Section):
    """Which variants `lookonce study report` compares."""

    baseline: VariantName | None = None
    """The variant with which the others are compared; by default all are compared with all. Fewer pairs are easier to
    tell apart."""
    variants: Annotated[list[VariantName], Field(max_length=MAX_RUNS)] | None = None
    """The variants that are compared, beside the baseline; by default all."""


class StudyFile(Section):
    """Variants, trained with the same seeds from one base run file."""

    removed: ClassVar = {"arms": "write `variants`"}
    base: UserPath
    """The run file that every variant changes."""
    variants: Annotated[dict[VariantName, VariantSection], Field(min_length=1)]
    """The variants by name. Each is a mapping of keys of the run file to values, as `--set` takes them; a variant
    without any is the base run file itself. `starts_from` names the variant with whose adapter of the same seed
    training starts, `answers_of` those whose answers `data.context` has. A variant with `route` is not trained: its
    answers are those of other variants."""
    output: UserPath
    """The folder of all runs: each run has the folder VARIANT-SEED in it."""
    seeds: Annotated[list[Seed], Field(min_length=1)] = [42]
    """Values of `train.seed`; every variant is trained with each of them."""
    evaluate: Literal["val", "test"] | None = None
    """The split whose questions every run answers; by default `eval.split` of the base run file."""
    compare: CompareSection = CompareSection()

    @model_validator(mode="after")
    def _is_consistent(self) -> StudyFile:
        if mistakes := list(self._mistakes()):
            raise ValueError("; ".join(mistakes))
        return self

    def _mistakes(self) -> Iterator[str]:
        if (num_runs := len(self.variants) * len(self.seeds)) > MAX_RUNS:
            yield (
                f"{count(len(self.variants), 'variant')} times {count(len(self.seeds), 'seed')} are {num_runs:,} runs, "
                f"and {MAX_RUNS:,} are allowed: remove seeds or variants, or write several study files"
            )
            return
        if len(set(self.seeds)) < len(self.seeds):
            yield f"seeds: a seed appears twice (got {shown(str(self.seeds))})"
        named = self._named_by_variants()
        for key, name in named.items():
            if name in self.routes:
                yield f"{key}: the variant {name} has a `{ROUTE}` and no adapter; name a variant that is trained"
        named |= {"compare.baseline": self.compare.baseline} if self.compare.baseline else {}
        named |= {f"compare.variants[{number}]": name for number, name in enumerate(self.compare.variants or [])}
        for key, name in named.items():
            if name not in self.variants:
                yield f"{key}: there is no variant {name!r}; the variants are {listed(list(self.variants), 9)}"
        try:
            TopologicalSorter({name: variant.needs for name, variant in self.variants.items()}).prepare()
        except CycleError as error:
            circle = " -> ".join(reversed(error.args[1]))
            yield f"the variants {circle} are a circle of {STARTS_FROM} and {ANSWERS_OF}; one must need no other"

    def _named_by_variants(self) -> dict[str, str]:
        """The names of variants in other variants, by their keys."""
        names: dict[str, str] = {}
        for name, variant in self.variants.items():
            names |= {f"variants.{name}.{STARTS_FROM}": variant.starts_from} if variant.starts_from else {}
            names |= {f"variants.{name}.{ANSWERS_OF}[{place}]": other for place, other in enumerate(variant.answers_of)}
            routed = variant.route.variants if variant.route else {}
            names |= {f"variants.{name}.{ROUTE}.variants.{value}": other for value, other in routed.items()}
        return names

    @property
    def trained(self) -> dict[str, VariantSection]:
        return {name: variant for name, variant in self.variants.items() if not variant.route}

    @property
    def routes(self) -> dict[str, RouteSection]:
        """The variants whose answers are those of other variants."""
        return {name: variant.route for name, variant in self.variants.items() if variant.route}

    def compared(self) -> list[str]:
        """The variants that are compared, the baseline first."""
        variants = self.compare.variants or list(self.variants)
        return list(dict.fromkeys([*filter(None, [self.compare.baseline]), *variants]))


def read_study(path: Path) -> StudyFile:
    """Read a study file; raises UsageError if it is missing or not YAML, or keys or values are wrong."""
    form = f"a mapping of {', '.join(StudyFile.model_fields)}"
    return read_settings(path, StudyFile, f"study file {path}", "see docs/studies.md", form)


@dataclass(frozen=True)
class StudyRun:
    """One variant, trained with one seed."""

    name: str
    variant: str
    seed: int
    settings: RunFile
    start: str | None
    """The name of the run with whose adapter this one starts."""
    answers_of: tuple[str, ...] = ()
    """The names of the runs whose answers are in its contexts."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The names of the runs that must be complete before."""
        return (*filter(None, [self.start]), *self.answers_of)

    @property
    def run_file(self) -> Path:
        return self.settings.output.parent / RUN_FILES / f"{self.name}.yaml"

    @property
    def log(self) -> Path:
        return self.settings.output.parent / LOGS / f"{self.name}.log"

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.settings.output)


def expand(study: StudyFile) -> dict[str, StudyRun]:
    """The runs of a study by name, seed by seed, in the order of the variants.

    Raises:
        UsageError: the base run file cannot be read, or changes of variants are wrong; all mistakes are named at once.
    """
    has_val = bool(read_run_file(study.base).data.val)
    runs: dict[str, StudyRun] = {}
    mistakes: dict[str, None] = {}
    for seed in study.seeds:
        for variant in study.trained:
            try:
                run = _run(study, variant, seed, has_val)
                runs[run.name] = run
            except UsageError as error:
                mistakes[f"variant {variant}: {error}"] = None
    for run in runs.values():
        mistakes |= dict.fromkeys(filter(None, (_other_shape(run, runs), _wrong_folds(run, runs))))
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return runs


def _run(study: StudyFile, variant: str, seed: int, has_val: bool) -> StudyRun:
    """The run of a variant and a seed; `has_val` says whether the base run file has validation records."""
    name, changes = f"{variant}-{seed}", study.variants[variant].changes
    start = f"{before}-{seed}" if (before := study.variants[variant].starts_from) else None
    answers_of = tuple(f"{other}-{seed}" for other in study.variants[variant].answers_of)
    values = changes | {"train.seed": seed, "output": str(study.output / name)}
    values |= {"eval.split": study.evaluate} if study.evaluate else {}
    values |= {START_KEY: str(study.output / start)} if start else {}
    if answers_of:
        folders = [RunFolder(study.output / other) for other in answers_of]
        # No model has seen the validation images, so the answers of the first one serve.
        of_val = [folders[0].predictions("val")] if changes.get("data.val", has_val) else []
        values[ANSWERS_KEY] = [str(path) for path in [*(folder.predictions(HELD_OUT) for folder in folders), *of_val]]
    assignments = [f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in values.items()]
    return StudyRun(name, variant, seed, read_run_file(study.base, assignments), start, answers_of)


def _other_shape(run: StudyRun, runs: Mapping[str, StudyRun]) -> str:
    """The mistake of a variant that starts from an adapter of another shape; empty if there is none."""
    start = runs.get(run.start or "")
    differing = shape_differences(run.settings.lora, start.settings.lora) if start else []
    if not start or not differing:
        return ""
    keys = listed([f"{key}: {value!r}, there {start_value!r}" for key, value, start_value in differing])
    return f"variant {run.variant}: the adapter of {start.variant} has another shape ({keys}); give both the same"


def _wrong_folds(run: StudyRun, runs: Mapping[str, StudyRun]) -> str:
    """The mistake of a variant whose answers are not those of a variant for each fold; empty if there is none."""
    if not all(name in runs for name in run.answers_of):
        return ""  # their own mistakes are named
    folds = {runs[name].variant: runs[name].settings.data.held_out for name in run.answers_of}
    number = len(run.answers_of)
    if {(fold.fold, fold.of) for fold in folds.values() if fold} == {(fold + 1, number) for fold in range(number)}:
        return ""
    named = [f"{variant}: {f'{fold.fold} of {fold.of}' if fold else 'none'}" for variant, fold in folds.items()]
    return (
        f"variant {run.variant}: answers_of needs a variant for each fold of the images, and names {listed(named, 9)}; "
        f"give each its own, such as data.held_out: {{fold: 1, of: {number}}}"
    )


def write_run_files(runs: Sequence[StudyRun], study: Path) -> None:
    """Write the run file of each run, with absolute paths, so that it can be used from any folder."""
    for run in runs:
        comment = f"# Variant {run.variant} with seed {run.seed} of the study {study}; written by lookonce study run.\n"
        write_text(run.run_file, comment + with_absolute_paths(run.settings).to_yaml())
