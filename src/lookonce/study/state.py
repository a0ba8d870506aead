"""What the run folders of a study say: how far each run is, and which were trained by an earlier study file.

Design: what was done is recorded nowhere else. A run is what its folder records, so a study continues after any crash,
and runs that were trained or evaluated by other commands count as well. A run whose record differs from the study file,
or that needs such a run, is *outdated*: it is never mixed with the others, but refused or trained again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookonce.differences import Difference
from lookonce.errors import UsageError
from lookonce.eval.scores.metrics import Score
from lookonce.report.contexts import asked_beside
from lookonce.run.folder import RECORD
from lookonce.run.open import answers_identity
from lookonce.run.start_adapter import start_identity
from lookonce.status import TrainingPhase, find_scores, find_training
from lookonce.study.expand import StudyRun
from lookonce.text import listed, shell

Runs = Mapping[str, StudyRun]


@dataclass(frozen=True)
class RunState:
    """How far a run is."""

    training: TrainingPhase
    score: Score | None
    """The score of the split that the study evaluates; None if it is not evaluated."""
    is_trained: bool
    is_complete: bool
    """Whether it is trained, and evaluated if it has questions."""
    not_asked: list[str]
    """With whose answers to earlier questions it is not asked yet beside its own evaluation: `true`, `none`."""


def read_state(one: StudyRun) -> RunState:
    """The state of a run now."""
    folder, split = one.folder, one.run.eval.split
    scores = find_scores(folder, split)
    is_evaluated = split in scores or not getattr(one.run.data, split)
    training = find_training(folder, one.run.cache.claim_s)
    not_asked = [kind for kind in asked_beside(one.run) if f"{split}-{kind}" not in scores]
    is_complete = folder.is_finished and is_evaluated
    return RunState(training, scores.get(split), folder.trained.exists(), is_complete, not_asked)


def find_outdated(runs: Runs) -> dict[str, str]:
    """Why runs do not belong to the study file any more, by name; those that need such a run are among them."""
    found: dict[str, str] = {}
    for one in in_chains(runs):
        if not (one.folder.holds_work and (one.folder.folder / RECORD).exists()):
            continue
        if reason := _lacks(one, runs, found):
            found[one.name] = reason
        elif changed := differs(one):
            found[one.name] = listed([f"{name}: now {now!r}, trained with {then!r}" for name, now, then in changed])
    return found


def differs(one: StudyRun) -> list[Difference]:
    """How the record in a run's folder differs from the study file."""
    return one.folder.differences(one.run, _needed(one))


def _lacks(one: StudyRun, runs: Runs, outdated: Collection[str]) -> str:
    """Why a run that has begun is outdated by those that it needs; empty if it is not."""
    for name in one.needs:
        how = f"starts from {name}, which" if name == one.start else f"has the answers of {name}, which"
        if name in outdated:
            return f"{how} is outdated"
        if not runs[name].folder.trained.exists():
            return f"{how} is not trained any more"
    return ""


def _needed(one: StudyRun) -> dict[str, Any]:
    """The recorded inputs of a run that are the results of others."""
    return start_identity(one.run, one.folder.recorded_inputs()) | answers_identity(one.run.data.context)


def in_chains(runs: Runs) -> list[StudyRun]:
    """The runs, each after those that it needs."""
    ordered: dict[str, StudyRun] = {}

    def add(one: StudyRun) -> None:
        for name in one.needs:
            add(runs[name])
        ordered.setdefault(one.name, one)

    for one in runs.values():
        add(one)
    return list(ordered.values())


def refuse_outdated(runs: Runs, again: Iterable[str], study: Path) -> set[str]:
    """The outdated runs, all of which must be named in `again`, by run or by arm, to be trained again.

    Raises:
        UsageError: some are not named; says what has changed. Or a name is neither a run nor an arm.
    """
    again, arms = list(again), {one.arm for one in runs.values()}
    if unknown := [name for name in again if name not in runs and name not in arms]:
        raise UsageError(f"--again {unknown[0]}: there is no such arm or run; the arms are {listed(sorted(arms), 9)}")
    outdated = find_outdated(runs)
    refused = [name for name in outdated if not {name, runs[name].arm} & {*again}]
    if refused:
        lines = [f"  {name}: {outdated[name]}" for name in outdated]
        names = dict.fromkeys([*again, *(runs[name].arm for name in refused)])
        raise UsageError(
            "\n".join(["the study has changed since these runs were trained:", *lines])
            + "\nundo the change, choose another `output`, or train them again (what they hold is moved away): "
            + shell("lookonce", "study", "run", study, *(word for name in names for word in ("--again", name)))
        )
    return set(outdated)
