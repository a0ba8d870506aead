"""What a chain of arms forgets: the exact match of each stage after each phase of the chain.

Design: each arm of a chain has answered the questions of all stages, so the matrix is read off its predictions. What is
forgotten of a stage is its best exact match after an earlier phase, less that after the last one. The figures are means
over the seeds of which all phases are complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from lookonce.eval.comparison.runs import Run
from lookonce.eval.scores.groups import scores_by
from lookonce.page import subsection, table
from lookonce.report.runs import Part
from lookonce.study.file import StudyFile
from lookonce.study.report.tables import Table
from lookonce.text import listed

TITLE = "Forgetting in chains"
NOTE = (
    "Exact match of the questions of each stage after each arm of a chain, as the mean over seeds. Forgotten: the best "
    "of the earlier arms less the last one, in points; below 0 the last one is better."
)
NONE = "No arm starts from another one, or no question has a stage."
FORGOTTEN = "forgotten"


@dataclass(frozen=True)
class Forgetting:
    """The matrix of one chain."""

    arms: list[str]
    """The phases: the arms of the chain, in order."""
    seeds: list[int]
    stages: list[str]
    exact_match: list[list[float]]
    """After each phase, of each stage."""
    forgotten: list[float]
    """The best of the earlier phases less the last one, of each stage."""

    def table(self) -> Table:
        """A line for each phase, and one for what is forgotten."""
        shown = [
            [arm, *(f"{share:.1%}" for share in line)] for arm, line in zip(self.arms, self.exact_match, strict=True)
        ]
        shown.append([FORGOTTEN, *(f"{100 * points:+.1f}" for points in self.forgotten)])
        by_stage = zip(self.stages, zip(*self.exact_match, self.forgotten, strict=True), strict=True)
        columns = {"after": [*self.arms, FORGOTTEN], **{f"stage {stage}": values for stage, values in by_stage}}
        return Table(f"forgetting-{self.arms[-1]}", ("after", *(f"stage {one}" for one in self.stages)), shown, columns)


def chains(study: StudyFile) -> list[list[str]]:
    """The chains of a study: its arms that no other one starts from, each after all that precede it.

    An arm of no epochs answers with the adapter of another one, and is no phase.
    """
    starts = {name: arm.starts_from for name, arm in study.trained.items() if arm.changes.get("train.epochs") != 0}
    found = []
    for name in starts:
        if starts[name] and name not in starts.values():
            chain = [name]
            while before := starts[chain[0]]:
                chain.insert(0, before)
            found.append(chain)
    return found


def find_forgetting(study: StudyFile, answers: Mapping[str, Run]) -> list[Forgetting]:
    """The matrix of each chain whose questions have stages; `answers` are those of complete runs, by name."""
    return [found for chain in chains(study) if (found := _matrix(chain, study.seeds, answers))]


def _matrix(chain: list[str], seeds: Sequence[int], answers: Mapping[str, Run]) -> Forgetting | None:
    seeds = [seed for seed in seeds if all(f"{arm}-{seed}" in answers for arm in chain)]
    scored = [
        [scores_by(answers[f"{arm}-{seed}"].predictions, "stage") for seed in seeds] for arm in chain
    ]  # by phase, seed and stage
    if not seeds or not scored[0][0]:
        return None
    stages = sorted(scored[0][0], key=lambda stage: (len(stage), stage))
    shares = [[fmean(by_stage[stage].exact_match for by_stage in phase) for stage in stages] for phase in scored]
    forgotten = [max(earlier) - last for *earlier, last in zip(*shares, strict=True)]
    return Forgetting(chain, list(seeds), stages, shares, forgotten)


def forgetting_part(found: Sequence[Forgetting]) -> Part:
    """The matrices as a part of the page."""
    shown = [(one, one.table()) for one in found]
    content = [
        element
        for one, its in shown
        for element in subsection(
            f"{' -> '.join(one.arms)}", f"Seeds: {listed(list(map(str, one.seeds)))}.", table(its.header, its.lines)
        )
    ]
    return Part("forgetting", TITLE, NOTE if found else NONE, [asdict(one) for one in found], content)
