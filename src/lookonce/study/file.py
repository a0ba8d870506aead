"""The study file: a base run file, arms that change it, seeds, and which arms are compared; and its runs.

    base: experiments/sample.yaml
    seeds: [42, 43]
    output: runs/study
    arms:
      plain:
      classic: {batch.questions_per_image: 1}
      longer: {starts_from: plain, train.epochs: 2}
      best-of-both: {route: {by: stage, arms: {1: plain, 2: longer}}}
      half-1: {data.held_out: {fold: 1, of: 2}}
      half-2: {data.held_out: {fold: 2, of: 2}}
      staged: {answers_of: [half-1, half-2], data.context: {by: stage, order: [1, 2]}}

Design: an arm says what `--set` says on the command line, so that the run file stays the only place where keys have a
meaning. Paths are relative to the working directory, as in a run file. All mistakes of the file are named at once.

The runs are arms times seeds, each an ordinary run file with a run folder of its own. A run is what its run file says
and nothing else, so each can be trained, resumed, evaluated and looked at by the other commands. Run files are written
again whenever the study runs; the record of what was trained is in the run folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

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
"""Keys of a run that name other runs, and the key of an arm that names arms instead."""
OWN_KEYS = {"train.seed": "seeds", "output": "output", "eval.split": "evaluate"}
"""Keys of a run that a study sets for all arms, and the key of the study file for each."""

RUN_FILES, LOGS = "run-files", "logs"
"""Folders in the output folder of a study, beside those of the runs."""
PAGE = "report.html"
"""The page in the output folder of a study, unless another is named."""
MAX_RUNS = 1000
"""The most runs of a study: they are all read, planned and compared at once."""
ArmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class RouteSection(Section):
    """Which arm's adapter answers which questions."""

    by: Label = "stage"
    """The label of a question that decides."""
    arms: Annotated[dict[Annotated[str, BeforeValidator(as_text)], ArmName], Field(min_length=1, max_length=MAX_RUNS)]
    """The arm for each value of the label."""


class ArmSection(Section):
    """One way to train: the base run file with changes; or one to answer with the adapters of other arms."""

    starts_from: ArmName | None = None
    """The arm with whose adapter of the same seed this one starts; by default a new adapter."""
    answers_of: Annotated[list[ArmName], Field(min_length=2, max_length=MAX_RUNS)] = []
    """The arms whose answers the contexts of training and validation records have, with the same seed. Each leaves out
    another fold of the images, so no answer is of a model that was trained on the image."""
    route: RouteSection | None = None
    """Trains nothing: each question has the answer of another arm with the same seed."""
    changes: dict[str, Any] = {}
    """Keys of the run file with their values: all keys of the arm but `starts_from`, `answers_of` and `route`."""

    @model_validator(mode="before")
    @classmethod
    def _keys_are_changes(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return {} if values is None else values
        own = {name: values[name] for name in (STARTS_FROM, ANSWERS_OF, ROUTE) if name in values}
        return own | {"changes": {name: value for name, value in values.items() if name not in own}}

    @model_validator(mode="after")
    def _leaves_to_the_study(self) -> ArmSection:
        if self.route and (self.changes or self.needs):
            raise ValueError(f"an arm with `{ROUTE}` is not trained, so it has no other key")
        for key in self.changes:
            if key in OWN_KEYS:
                raise ValueError(f"{key} is set for all arms; set `{OWN_KEYS[key]}` of the study file instead")
            if "." not in key:  # a whole section would replace that of the base run file
                raise ValueError(f"{key}: name single keys of the run file, such as train.epochs, or {STARTS_FROM}")
        for key, own in SET_BY.items():
            if key in self.changes and getattr(self, own):
                raise ValueError(f"{own} names arms, and {key} other runs; use one of them")
        return self

    @property
    def needs(self) -> list[str]:
        """The arms that must have been trained, and have answered, before this one is trained."""
        return [*filter(None, [self.starts_from]), *self.answers_of]


class CompareSection(Section):
    """Which arms `lookonce study report` compares."""

    baseline: ArmName | None = None
    """The arm with which the others are compared; by default all are compared with all. Fewer pairs are easier to tell
    apart."""
    arms: Annotated[list[ArmName], Field(max_length=MAX_RUNS)] | None = None
    """The arms that are compared, beside the baseline; by default all."""


class StudyFile(Section):
    """Arms, trained with the same seeds from one base run file."""

    base: UserPath
    """The run file that every arm changes."""
    arms: Annotated[dict[ArmName, ArmSection], Field(min_length=1)]
    """The arms by name. Each is a mapping of keys of the run file to values, as `--set` takes them; an arm without any
    is the base run file itself. `starts_from` names the arm with whose adapter of the same seed training starts,
    `answers_of` those whose answers `data.context` has. An arm with `route` is not trained: its answers are those of
    other arms."""
    output: UserPath
    """The folder of all runs: each run has the folder ARM-SEED in it."""
    seeds: Annotated[list[Seed], Field(min_length=1)] = [42]
    """Values of `train.seed`; every arm is trained with each of them."""
    evaluate: Literal["val", "test"] | None = None
    """The split whose questions every run answers; by default `eval.split` of the base run file."""
    compare: CompareSection = CompareSection()

    @model_validator(mode="after")
    def _is_consistent(self) -> StudyFile:
        if mistakes := list(self._mistakes()):
            raise ValueError("; ".join(mistakes))
        return self

    def _mistakes(self) -> Iterator[str]:
        if (num_runs := len(self.arms) * len(self.seeds)) > MAX_RUNS:
            yield (
                f"{count(len(self.arms), 'arm')} times {count(len(self.seeds), 'seed')} are {num_runs:,} runs; at most "
                f"{MAX_RUNS:,} are allowed: remove seeds or arms, or write several study files"
            )
            return
        if len(set(self.seeds)) < len(self.seeds):
            yield f"seeds: a seed is there twice (got {shown(str(self.seeds))})"
        named = self._named_by_arms()
        for key, name in named.items():
            if name in self.routes:
                yield f"{key}: the arm {name} has a `{ROUTE}` and no adapter; name an arm that is trained"
        named |= {"compare.baseline": self.compare.baseline} if self.compare.baseline else {}
        named |= {f"compare.arms[{number}]": name for number, name in enumerate(self.compare.arms or [])}
        for key, name in named.items():
            if name not in self.arms:
                yield f"{key}: there is no arm {name!r}; the arms are {listed(list(self.arms), 9)}"
        try:
            TopologicalSorter({name: arm.needs for name, arm in self.arms.items()}).prepare()
        except CycleError as error:
            circle = " -> ".join(reversed(error.args[1]))
            yield f"the arms {circle} are a circle of {STARTS_FROM} and {ANSWERS_OF}; one of them must need no other"

    def _named_by_arms(self) -> dict[str, str]:
        """The names of arms in other arms, by their keys."""
        found: dict[str, str] = {}
        for name, arm in self.arms.items():
            found |= {f"arms.{name}.{STARTS_FROM}": arm.starts_from} if arm.starts_from else {}
            found |= {f"arms.{name}.{ANSWERS_OF}[{place}]": other for place, other in enumerate(arm.answers_of)}
            routed = arm.route.arms if arm.route else {}
            found |= {f"arms.{name}.{ROUTE}.arms.{value}": other for value, other in routed.items()}
        return found

    @property
    def trained(self) -> dict[str, ArmSection]:
        """The arms that are trained."""
        return {name: arm for name, arm in self.arms.items() if not arm.route}

    @property
    def routes(self) -> dict[str, RouteSection]:
        """The arms whose answers are those of other arms."""
        return {name: arm.route for name, arm in self.arms.items() if arm.route}

    def compared(self) -> list[str]:
        """The arms that are compared, the baseline first."""
        arms = self.compare.arms or list(self.arms)
        return list(dict.fromkeys([*filter(None, [self.compare.baseline]), *arms]))


def read_study(path: Path) -> StudyFile:
    """Read a study file.

    Raises:
        UsageError: it is missing or not YAML, or keys or values are wrong.
    """
    expected = f"a mapping of {', '.join(StudyFile.model_fields)}"
    return read_settings(path, StudyFile, f"study file {path}", "see docs/studies.md", expected)


@dataclass(frozen=True)
class StudyRun:
    """One arm, trained with one seed."""

    name: str
    arm: str
    seed: int
    run: RunFile
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
        return self.run.output.parent / RUN_FILES / f"{self.name}.yaml"

    @property
    def log(self) -> Path:
        return self.run.output.parent / LOGS / f"{self.name}.log"

    @cached_property
    def folder(self) -> RunFolder:
        return RunFolder(self.run.output)


def expand(study: StudyFile) -> dict[str, StudyRun]:
    """The runs of a study by name, seed by seed, in the order of the arms.

    Raises:
        UsageError: the base run file cannot be read, or changes of arms are wrong; all mistakes are named at once.
    """
    has_val = bool(read_run_file(study.base).data.val)
    runs: dict[str, StudyRun] = {}
    mistakes: dict[str, None] = {}
    for seed in study.seeds:
        for arm in study.trained:
            try:
                found = _run(study, arm, seed, has_val)
                runs[found.name] = found
            except UsageError as error:
                mistakes[f"arm {arm}: {error}"] = None
    for one in runs.values():
        mistakes |= dict.fromkeys(filter(None, (_other_shape(one, runs), _wrong_folds(one, runs))))
    if mistakes:
        raise UsageError("\n".join(mistakes))
    return runs


def _run(study: StudyFile, arm: str, seed: int, has_val: bool) -> StudyRun:
    """The run of an arm and a seed; `has_val` says whether the base run file has validation records.

    Raises:
        UsageError: a key or value of the arm is wrong.
    """
    name, changes = f"{arm}-{seed}", study.arms[arm].changes
    start = f"{before}-{seed}" if (before := study.arms[arm].starts_from) else None
    answers_of = tuple(f"{other}-{seed}" for other in study.arms[arm].answers_of)
    values = changes | {"train.seed": seed, "output": str(study.output / name)}
    values |= {"eval.split": study.evaluate} if study.evaluate else {}
    values |= {START_KEY: str(study.output / start)} if start else {}
    if answers_of:
        folders = [RunFolder(study.output / other) for other in answers_of]
        # No model has seen the validation images, so the answers of the first one serve.
        of_val = [folders[0].predictions("val")] if changes.get("data.val", has_val) else []
        values[ANSWERS_KEY] = [str(path) for path in [*(one.predictions(HELD_OUT) for one in folders), *of_val]]
    assignments = [f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in values.items()]
    return StudyRun(name, arm, seed, read_run_file(study.base, assignments), start, answers_of)


def _other_shape(one: StudyRun, runs: Mapping[str, StudyRun]) -> str:
    """The mistake of an arm that starts from an adapter of another shape; empty if there is none."""
    start = runs.get(one.start or "")
    found = shape_differences(one.run.lora, start.run.lora) if start else []
    if not start or not found:
        return ""
    keys = listed([f"{key}: {mine!r}, there {theirs!r}" for key, mine, theirs in found])
    return f"arm {one.arm}: starts_from {start.arm}, whose adapter has another shape ({keys}); give both the same"


def _wrong_folds(one: StudyRun, runs: Mapping[str, StudyRun]) -> str:
    """The mistake of an arm whose answers are not those of an arm for each fold; empty if there is none."""
    if not all(name in runs for name in one.answers_of):
        return ""  # their own mistakes are named
    folds = {runs[name].arm: runs[name].run.data.held_out for name in one.answers_of}
    number = len(one.answers_of)
    if {(fold.fold, fold.of) for fold in folds.values() if fold} == {(fold + 1, number) for fold in range(number)}:
        return ""
    named = [f"{arm}: {f'{fold.fold} of {fold.of}' if fold else 'none'}" for arm, fold in folds.items()]
    return (
        f"arm {one.arm}: answers_of needs an arm for each fold of the images, and names {listed(named, 9)}; give each "
        f"its own, such as data.held_out: {{fold: 1, of: {number}}}"
    )


def write_run_files(runs: Sequence[StudyRun], study: Path) -> None:
    """Write the run file of each run, with absolute paths, so that it can be used from any folder."""
    for one in runs:
        comment = f"# Arm {one.arm} with seed {one.seed} of the study {study}; written by lookonce study run.\n"
        write_text(one.run_file, comment + with_absolute_paths(one.run).to_yaml())
