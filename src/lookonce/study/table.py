"""`lookonce study status`: the runs of a study as a table, read from their folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lookonce.run.folder import RECORD
from lookonce.study.expand import StudyRun, expand
from lookonce.study.file import read_study
from lookonce.study.state import RunState, find_outdated, read_state
from lookonce.text import count, listed, table

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
        return cls(runs, {name: read_state(one) for name, one in runs.items()}, find_outdated(runs), others)

    def is_current(self, name: str) -> bool:
        """Whether a run is complete, and of this study file."""
        return self.states[name].is_complete and name not in self.outdated

    @property
    def num_complete(self) -> int:
        return sum(map(self.is_current, self.runs))

    def to_json(self) -> dict[str, Any]:
        values = [
            {"run": name, "arm": one.arm, "seed": one.seed, "starts_from": one.start, "folder": one.run.output}
            | asdict(self.states[name])
            | {"outdated": self.outdated.get(name)}
            for name, one in self.runs.items()
        ]
        return {"runs": values, "others": self.others}

    def text(self) -> str:
        lines = [table(HEADER, [_row(name, state, name in self.outdated) for name, state in self.states.items()])]
        lines += [f"{name} is outdated: {reason}" for name, reason in self.outdated.items()]
        if self.others:
            lines.append(f"not of this study any more, and left alone: {listed(self.others)}")
        return "\n".join([*lines, "", f"{self.num_complete} of {count(len(self.runs), 'run')} complete"])


def _row(name: str, state: RunState, is_outdated: bool) -> tuple[str, ...]:
    training, score = state.training, state.score
    steps = f"{training.step:,} of {training.num_steps:,}" if training.num_steps else ""
    steps = f"{training.num_steps:,}" if state.is_trained else steps
    scores = (f"{score.exact_match:.1%}", f"{score.majority:.1%}") if score else ("", "")
    return name, "outdated" if is_outdated else training.state, steps, *scores
