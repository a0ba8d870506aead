"""`lookonce study status`: the runs of a study as a table, read from their folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lookonce.eval.scores.prediction import Score
from lookonce.run.folder import RECORD
from lookonce.study.expand import StudyRun, expand
from lookonce.study.file import read_study
from lookonce.study.routing import RoutedRun, routed_runs
from lookonce.study.state import RunState, find_outdated, read_state
from lookonce.text import count, listed, table

WORDS = {"true": "true", "none": "no"}
"""Whose answers stand in a context, as they are named in a sentence."""
HEADER = ("run", "state", "steps", "exact match", "majority")


@dataclass(frozen=True)
class StudyStatus:
    """How far the runs of a study are."""

    runs: Mapping[str, StudyRun]
    states: Mapping[str, RunState]
    outdated: Mapping[str, str]
    """Why runs do not belong to the study file any more."""
    others: list[str]
    """Runs in the output folder that are not of this study any more."""
    routed: Mapping[str, RoutedRun]
    """The arms whose answers are those of other arms."""

    @classmethod
    def read(cls, path: Path) -> StudyStatus:
        """The state now.

        Raises:
            LookonceError: the study file or a run file is wrong, or the record of a run is broken.
        """
        study = read_study(path)
        runs = expand(study)
        found = {record.parent.name for record in study.output.glob(f"*/{RECORD}")}
        others = sorted(name for name in found - runs.keys() if ".old-" not in name)
        states = {name: read_state(one) for name, one in runs.items()}
        return cls(runs, states, find_outdated(runs), others, routed_runs(study, runs))

    def is_current(self, name: str) -> bool:
        """Whether a run is complete, and of this study file."""
        return self.states[name].is_complete and name not in self.outdated

    def has_answered(self, name: str) -> bool:
        """Whether a run is complete, of this study file, and evaluated; of a routed one, whether its runs are."""
        if name in self.routed:
            return all(self.has_answered(one.name) for one in self.routed[name].runs.values())
        return self.is_current(name) and self.states[name].score is not None

    @property
    def num_complete(self) -> int:
        return sum(map(self.is_current, self.runs))

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.num_complete == len(self.runs) and not self._not_asked()

    def _not_asked(self) -> list[tuple[str, str]]:
        """The complete runs that lack answers beside their own evaluation, and with which context."""
        absent = {name: state.not_asked for name, state in self.states.items() if self.is_current(name)}
        return [(name, " and ".join(WORDS[kind] for kind in kinds)) for name, kinds in absent.items() if kinds]

    def to_json(self) -> dict[str, Any]:
        values = [
            {"run": name, "arm": one.arm, "seed": one.seed, "starts_from": one.start, "answers_of": one.answers_of}
            | {"folder": one.run.output}
            | asdict(self.states[name])
            | {"outdated": self.outdated.get(name)}
            for name, one in self.runs.items()
        ]
        routed = [one.to_json() | {"score": self._score(one)} for one in self.routed.values()]
        return {"runs": values, "routed": routed, "others": self.others}

    def _score(self, routed: RoutedRun) -> Score | None:
        return routed.score() if self.has_answered(routed.name) else None

    def text(self) -> str:
        runs = [_row(name, state, name in self.outdated) for name, state in self.states.items()]
        routed = [(one.name, "routed", "", *_figures(self._score(one))) for one in self.routed.values()]
        lines = [table(HEADER, [*runs, *routed])]
        lines += [f"{name} is outdated: {reason}" for name, reason in self.outdated.items()]
        lines += [f"{name} is not asked with {said} context yet" for name, said in self._not_asked()]
        if self.others:
            lines.append(f"not of this study any more, and left alone: {listed(self.others)}")
        return "\n".join([*lines, "", f"{self.num_complete} of {count(len(self.runs), 'run')} complete"])


def _row(name: str, state: RunState, is_outdated: bool) -> tuple[str, ...]:
    training = state.training
    steps = f"{training.step:,} of {training.num_steps:,}" if training.num_steps else ""
    steps = f"{training.num_steps:,}" if state.is_trained else steps
    return name, "outdated" if is_outdated else training.state, steps, *_figures(state.score)


def _figures(score: Score | None) -> tuple[str, str]:
    return (f"{score.exact_match:.1%}", f"{score.majority:.1%}") if score else ("", "")
