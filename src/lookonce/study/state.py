"""What the run folders of a study say: how far each run is, and which were trained by an earlier study file.

Design: what was done is recorded nowhere else. A run is what its folder records, so a study continues after any crash,
and runs that were trained or evaluated by other commands count as well. A run whose record differs from the study file,
or that starts from such a run, is *outdated*: it is never mixed with the others, but refused or trained again.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lookonce.errors import UsageError
from lookonce.eval.scores.metrics import Score
from lookonce.run.folder import RECORD
from lookonce.run.start_adapter import start_identity
from lookonce.status.report import TrainingPhase
from lookonce.status.status import find_scores, find_training
from lookonce.study.expand import StudyRun
from lookonce.text import listed

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


def read_state(one: StudyRun) -> RunState:
    """The state of a run now."""
    folder, split = one.folder, one.run.eval.split
    score = find_scores(folder, split).get(split)
    is_evaluated = score is not None or not getattr(one.run.data, split)
    training = find_training(folder, one.run.cache.claim_s)
    return RunState(training, score, folder.trained.exists(), folder.is_finished and is_evaluated)


def find_outdated(runs: Runs) -> dict[str, str]:
    """Why runs do not belong to the study file any more, by name; those that start from such a run are among them."""
    found: dict[str, str] = {}
    for one in in_chains(runs):
        if not (one.folder.holds_work and (one.folder.folder / RECORD).exists()):
            continue
        if one.start in found:
            found[one.name] = f"starts from {one.start}, which is outdated"
        elif one.start and not runs[one.start].folder.trained.exists():
            found[one.name] = f"starts from {one.start}, which is not trained any more"
        elif changed := one.folder.differences(one.run, start_identity(one.run, one.folder.recorded_inputs())):
            found[one.name] = listed([f"{name}: now {now!r}, trained with {then!r}" for name, now, then in changed])
    return found


def in_chains(runs: Runs) -> list[StudyRun]:
    """The runs, each after the one that it starts from."""
    ordered: dict[str, StudyRun] = {}

    def add(one: StudyRun) -> None:
        if one.start:
            add(runs[one.start])
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
            + f"lookonce study run {shlex.quote(str(study))} {' '.join(f'--again {name}' for name in names)}"
        )
    return set(outdated)
