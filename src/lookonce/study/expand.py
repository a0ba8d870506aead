"""The runs of a study: arms times seeds, each an ordinary run file with a run folder of its own.

Design: a run of a study is what its run file says and nothing else, so each can be trained, resumed, evaluated and
looked at by the other commands. Run files are written again whenever the study runs; the record of what was trained is
in the run folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lookonce.errors import UsageError
from lookonce.files import write_text
from lookonce.run.absolute import with_absolute_paths
from lookonce.run.config import RunFile, read_run_file
from lookonce.run.folder import RunFolder
from lookonce.run.records import HELD_OUT
from lookonce.run.start_adapter import shape_differences
from lookonce.study.file import ANSWERS_KEY, START_KEY, StudyFile
from lookonce.text import listed

RUN_FILES, LOGS = "run-files", "logs"
"""Folders in the output folder of a study, beside those of the runs."""


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
