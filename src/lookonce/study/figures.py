"""Figures of the arms of a study: scores and costs, what chains forget, own, true and no earlier answers; as tables.

Design: scores and differences are those of `lookonce compare`. The cost of an arm is that of its own training and of
all that it needs: the arms before it in its chain, or those that it is routed to. What several arms need counts for
each of them, since each alone would have to pay it. The cost of answering is that of its own answers.

Each arm of a chain has answered the questions of all stages, so what a chain forgets is read off its predictions. What
is forgotten of a stage is its best exact match after an earlier phase, less that after the last one. The figures are
means over the seeds of which all phases are complete.

As files, tables are CSV with the figures as they are, and LaTeX with the cells as the page shows them. LaTeX needs the
package booktabs. All characters that mean something in LaTeX are escaped.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lookonce import page
from lookonce.datasets.text_files import safe_cell
from lookonce.eval.compare import Candidate, Comparison, Pair, shown_p
from lookonce.eval.join import Run
from lookonce.eval.scores.prediction import scores_by
from lookonce.eval.statistics import Interval
from lookonce.files import write_text
from lookonce.page import sentences, subsection
from lookonce.report.contexts import HEADER as CONTEXTS_HEADER
from lookonce.report.contexts import KINDS, PAIRS, Cell, ContextScores, context_cells
from lookonce.report.runs import Part, ReportedRun
from lookonce.report.training import Cost
from lookonce.study.file import StudyFile
from lookonce.text import count, duration, listed, table

SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}"},
}
"""How LaTeX writes characters that mean something in it."""


@dataclass(frozen=True)
class Table:
    """A table, as it is shown and as figures."""

    name: str
    """The end of the names of its files."""
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    """The cells as they are shown."""
    columns: Mapping[str, Sequence[Any]]
    """The figures by the name of their column; None where there is none."""

    def to_csv(self) -> str:
        """The figures, with a line for their names."""
        text = io.StringIO()
        writer = csv.writer(text)  # with another end of lines it would not quote a cell with "\r"
        writer.writerow(map(safe_cell, self.columns))
        for cells in zip(*self.columns.values(), strict=True):
            writer.writerow([safe_cell(cell) if isinstance(cell, str) else cell for cell in cells])
        return text.getvalue()

    def to_latex(self) -> str:
        """The shown cells as a tabular; the first column is aligned left, the others right."""
        lines = [_latex_row(self.header), r"\midrule", *map(_latex_row, self.lines)]
        begin = rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}"
        return "\n".join([begin, r"\toprule", *lines, r"\bottomrule", r"\end{tabular}", ""])


def ends(name: str, intervals: Sequence[Interval | None]) -> dict[str, list[float | None]]:
    """The columns of both ends of some intervals."""
    return {
        f"{name}_low": [one.low if one else None for one in intervals],
        f"{name}_high": [one.high if one else None for one in intervals],
    }


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join("".join(SPECIAL.get(character, character) for character in cell) for cell in cells) + r" \\"


def write_tables(tables: Iterable[Table], page: Path) -> list[Path]:
    """Write each table as CSV and LaTeX beside a page, named after it; returns the paths."""
    written = []
    for one in tables:
        for suffix, text in ((".csv", one.to_csv()), (".tex", one.to_latex())):
            written.append(page.with_name(f"{page.stem}-{one.name}{suffix}"))
            write_text(written[-1], text)
    return written


def context_table(one: ContextScores) -> Table:
    """A line for all questions of an arm, and one for each stage."""
    columns: dict[str, Any] = {"questions": list(one.num_questions), "num_questions": list(one.num_questions.values())}
    for name in (*KINDS, *PAIRS):
        by_group = (one.exact_match | one.differences).get(name, {})
        found = [by_group.get(group) for group in one.num_questions]
        column = name.replace(" - ", "_less_")
        columns[column] = [estimate.value if estimate else None for estimate in found]
        columns |= ends(column, [estimate.interval if estimate else None for estimate in found])
    lines = [[group, *map(_with_interval, cells)] for group, cells in context_cells(one).items()]
    return Table(f"contexts-{one.name}", CONTEXTS_HEADER, lines, columns)


def context_text(one: ContextScores) -> str:
    """The same in 80 columns, where only differences have intervals; and the commands that ask what is absent."""
    lines = [
        [group, *(words for words, _ in cells[: len(KINDS)]), *map(_with_interval, cells[len(KINDS) :])]
        for group, cells in context_cells(one).items()
    ]
    missing = [f"not asked yet; run: {line}" for line in one.not_asked]
    return "\n".join([f"{one.title} with own, true and no earlier answers", table(CONTEXTS_HEADER, lines), *missing])


def _with_interval(cell: Cell) -> str:
    words, interval = cell
    return f"{words} [{interval}]" if interval else words


SCORES = ("arm", "exact match", "95% interval", "points", "95% interval", "p (Holm)", "seeds differ by")
HEADER = (*SCORES, "records", "training", "answering")
FIGURES = ("num_records", "training_seconds", "answering_seconds")
ARMS_NOTE = (
    "Exact match is the mean over seeds. Points: the arm less the first one, with the p of sign flips by image after "
    "Holm's correction. Records are those that are trained on, over all epochs; records and training are of one seed, "
    "with the arms that the arm starts from or is routed to."
)


@dataclass(frozen=True)
class ArmCost:
    """The mean cost of an arm over its seeds; None where it is not recorded."""

    needs: list[str]
    """The arms whose training it needs, and itself if it is trained."""
    num_records: float | None
    """Records that one seed is trained on."""
    training_seconds: float | None
    """None also if a training was resumed, because its record has the time since then."""
    answering_seconds: float | None

    @classmethod
    def of(cls, arm: str, study: StudyFile, seeds: Sequence[int], costs: Mapping[str, Cost]) -> ArmCost:
        """`costs` are those of the runs by name, such as plain-42."""
        needs = needs_of(arm, study)
        answering = set(study.routes[arm].arms.values()) if arm in study.routes else {arm}
        trained, answered = (
            [[costs.get(f"{one}-{seed}") for one in some] for seed in seeds] for some in (needs, answering)
        )
        is_resumed = any(one and one.first_step for some in trained for one in some)
        return cls(
            needs,
            _mean(trained, "num_samples"),
            None if is_resumed else _mean(trained, "training_seconds"),
            _mean(answered, "answering_seconds"),
        )


@dataclass(frozen=True)
class ArmFigures:
    """One arm, with all its seeds."""

    arm: str
    seeds: list[int]
    exact_match: float
    interval: Interval | None
    majority: float
    spread: float | None
    """The exact match of the best seed less that of the worst; None for one seed."""
    difference: float | None
    """The exact match less that of the baseline arm; None for that arm itself."""
    difference_interval: Interval | None
    p_holm: float | None
    is_distinguishable: bool
    cost: ArmCost
    sentence: str

    def row(self) -> list[str]:
        """The cells of the table."""
        cost = self.cost
        return [
            self.arm,
            f"{self.exact_match:.1%}",
            self.interval.in_percent() if self.interval else "none",
            "" if self.difference is None else f"{100 * self.difference:+.1f}",
            self.difference_interval.in_percent() if self.difference_interval else "",
            "" if self.p_holm is None else shown_p(self.p_holm),
            "" if self.spread is None else f"{100 * self.spread:.1f}",
            "" if cost.num_records is None else f"{cost.num_records:,.0f}",
            "" if cost.training_seconds is None else duration(cost.training_seconds),
            "" if cost.answering_seconds is None else duration(cost.answering_seconds),
        ]


def needs_of(arm: str, study: StudyFile) -> list[str]:
    """The arms whose training an arm needs, itself included, each after those that it needs."""
    is_routed = arm in study.routes
    before = study.routes[arm].arms.values() if is_routed else study.arms[arm].needs
    found = dict.fromkeys(one for other in before for one in needs_of(other, study))
    return list(found if is_routed else found | {arm: None})


def _mean(costs: Sequence[Sequence[Cost | None]], name: str) -> float | None:
    """The mean over seeds of the sum over arms; None if a value is not known."""
    values: list[list[Any]] = [[getattr(one, name) if one else None for one in some] for some in costs]
    return None if any(value is None for some in values for value in some) else fmean(sum(some) for some in values)


def figures(comparison: Comparison, study: StudyFile, runs: Mapping[str, ReportedRun]) -> list[ArmFigures]:
    """The figures of all compared arms; without a baseline the first arm is one. `runs` are by name."""
    first = comparison.candidates[0]
    pairs = {pair.second: pair for pair in comparison.pairs if pair.first == first.name}
    costs = {name: Cost.of(run) for name, run in runs.items()}
    return [_figures(one, pairs.get(one.name), comparison, study, costs) for one in comparison.candidates]


def _figures(
    one: Candidate, pair: Pair | None, comparison: Comparison, study: StudyFile, costs: Mapping[str, Cost]
) -> ArmFigures:
    arm = one.runs[0]
    found = ArmFigures(
        arm=arm,
        seeds=one.seeds,
        exact_match=one.exact_match,
        interval=one.interval,
        majority=one.majority,
        spread=one.spread,
        difference=pair.difference if pair else None,
        difference_interval=pair.interval if pair else None,
        p_holm=pair.p_holm if pair else None,
        is_distinguishable=bool(pair and pair.better),
        cost=ArmCost.of(arm, study, one.seeds, costs),
        sentence="",
    )
    return replace(found, sentence=_sentence(found, comparison))


def _sentence(one: ArmFigures, comparison: Comparison) -> str:
    """The figures of an arm as a person would write them into a paper."""
    asked = f"{count(comparison.num_questions, 'question')} about {count(comparison.num_images, 'image')}"
    seeds = "" if one.spread is None else f", mean of {len(one.seeds)} seeds, {100 * one.spread:.1f} points apart"
    said = f"{one.arm} answers {one.exact_match:.1%} of {asked} exactly right ({_interval(one.interval)}{seeds})"
    if one.difference is not None and one.p_holm is not None:
        more = "more" if one.difference >= 0 else "fewer"
        verdict = "a difference beyond chance" if one.is_distinguishable else "not distinguishable"
        interval = one.difference_interval  # in the direction of the sentence
        turned = Interval(-interval.high, -interval.low) if interval and one.difference < 0 else interval
        tested = f"{_interval(turned)}, p after Holm {shown_p(one.p_holm)}"
        first = comparison.candidates[0].runs[0]
        said += f", {100 * abs(one.difference):.1f} points {more} than {first} ({tested}: {verdict})"
    if one.cost.num_records is not None:
        took = f" in {duration(one.cost.training_seconds)}" if one.cost.training_seconds is not None else ""
        said += f", after training on {one.cost.num_records:,.0f} records{took}"
    return f"{said}."


def _interval(interval: Interval | None) -> str:
    return f"95% interval {interval.in_percent()}" if interval else "no interval"


def arms_table(found: Sequence[ArmFigures]) -> Table:
    """All figures of the arms."""
    columns = {name: [getattr(one, name) for one in found] for name in ("arm", "exact_match", "majority")}
    columns |= ends("interval", [one.interval for one in found])
    columns |= {"difference": [one.difference for one in found]}
    columns |= ends("difference", [one.difference_interval for one in found])
    columns |= {name: [getattr(one, name) for one in found] for name in ("p_holm", "spread")}
    columns |= {name: [getattr(one.cost, name) for one in found] for name in FIGURES}
    return Table("arms", HEADER, [one.row() for one in found], columns)


def arms_part(found: Sequence[ArmFigures], note: str) -> Part:
    """The arms as a part of the page; `note` says whose the majority answers are."""
    shown = [page.table(HEADER, [one.row() for one in found]), sentences([one.sentence for one in found])]
    return Part("arms", f"Arms against {found[0].arm}", f"{ARMS_NOTE} {note}", [asdict(one) for one in found], shown)


FORGETTING_TITLE = "Forgetting in chains"
FORGETTING_NOTE = (
    "Exact match of the questions of each stage after each arm of a chain, as the mean over seeds. Forgotten: the best "
    "of the earlier arms less the last one, in points; below 0 the last one is better."
)
NO_FORGETTING = "No arm starts from another one, or no question has a stage."
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
            f"{' -> '.join(one.arms)}",
            f"Seeds: {listed(list(map(str, one.seeds)))}.",
            page.table(its.header, its.lines),
        )
    ]
    return Part(
        "forgetting",
        FORGETTING_TITLE,
        FORGETTING_NOTE if found else NO_FORGETTING,
        [asdict(one) for one in found],
        content,
    )
