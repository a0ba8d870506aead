"""Figures of the variants of a study: scores and costs, scores by question and stage, what sequences forget; as tables.

Design: scores and differences are those of `lookonce compare`. The cost of a variant is that of its own training and of
all that it needs: the variants before it in its sequence, or those that it is routed to. What several need counts for
each of them, since each alone would have to pay it. The cost of answering is that of its own answers.

Each variant of a sequence has answered the questions of all stages, so what a sequence forgets is read off its
predictions: the best exact match after an earlier phase, less that after the last one. The figures are means over the
seeds of which all phases are complete.

As files, tables are CSV with the figures as they are, and LaTeX with the cells as the page shows them. LaTeX needs the
package booktabs. All characters that mean something in LaTeX are escaped.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from lookonce.datasets.text_files import safe_cell
from lookonce.eval.compare import Comparison
from lookonce.eval.join import Run
from lookonce.eval.scores.prediction import MAX_GROUPS, scores_by
from lookonce.eval.statistics import Interval
from lookonce.report.contexts import HEADER as CONTEXTS_HEADER
from lookonce.report.contexts import KINDS, PAIRS, Cell, ContextScores, context_cells
from lookonce.report.runs import Cost, ReportedRun
from lookonce.study.file import StudyFile
from lookonce.text import count, duration, listed, shown_p, table

SPECIAL = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}"},
}
"""How LaTeX writes characters that mean something in it."""


def latex(text: str) -> str:
    """A text as LaTeX shows it."""
    return "".join(SPECIAL.get(character, character) for character in text)


@dataclass(frozen=True)
class Table:
    """A table, as it is shown and as figures."""

    name: str
    """The end of the names of its files."""
    title: str
    note: str
    """What the figures mean: the caption in LaTeX."""
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    """The cells as they are shown."""
    figures: Sequence[Mapping[str, Any]]
    """The figures of each line by the name of their column; None where there is none."""

    def to_csv(self) -> str:
        """The figures, with a line for their names."""
        text = io.StringIO()
        writer = csv.writer(text)  # with another end of lines it would not quote a cell with "\r"
        writer.writerow(map(safe_cell, self.figures[0]))
        for line in self.figures:
            writer.writerow([safe_cell(cell) if isinstance(cell, str) else cell for cell in line.values()])
        return text.getvalue()

    def to_latex(self) -> str:
        """The shown cells as a table with a caption; the first column is aligned left, the others right."""
        rows = [" & ".join(map(latex, line)) + r" \\" for line in (self.header, *self.lines)]
        small = r"\scriptsize\setlength{\tabcolsep}{3pt}" if len(self.header) > 6 else r"\small"
        caption = rf"\caption{{{latex(f'{self.title}. {self.note}')}}}"
        begin = [r"\begin{table}", r"\centering", small, caption, rf"\label{{tab:{latex(self.name)}}}"]
        tabular = rf"\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}"
        lines = [*begin, tabular, r"\toprule", rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}"]
        return "\n".join([*lines, r"\end{table}", ""])


def _ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Both ends of an interval, by the names of their columns."""
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


@dataclass(frozen=True)
class ArmCost:
    """The mean cost of a variant over its seeds; None where it is not recorded."""

    needs: list[str]
    """The variants whose training it needs, and itself if it is trained."""
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
            _sum_of(trained, "num_samples"),
            None if is_resumed else _sum_of(trained, "training_seconds"),
            _sum_of(answered, "answering_seconds"),
        )


@dataclass(frozen=True)
class ArmFigures:
    """One variant, with all its seeds."""

    arm: str
    seeds: list[int]
    exact_match: float
    exact_match_by_seed: list[float]
    interval: Interval | None
    majority: float
    spread: float | None
    """The exact match of the best seed less that of the worst; None for one seed."""
    difference: float | None
    """The exact match less that of the baseline variant; None for that variant itself."""
    difference_interval: Interval | None
    p_holm: float | None
    is_distinguishable: bool
    cost: ArmCost
    sentence: str = ""

    def row(self) -> list[str]:
        """The cells of the table."""
        cost = self.cost
        return [
            self.arm,
            f"{self.exact_match:.1%}",
            self.interval.in_percent() if self.interval else "none",
            f"{self.majority:.1%}",
            "" if self.difference is None else f"{100 * self.difference:+.1f}",
            self.difference_interval.in_percent() if self.difference_interval else "",
            "" if self.p_holm is None else shown_p(self.p_holm),
            "" if self.spread is None else f"{100 * self.spread:.1f}",
            "" if cost.num_records is None else f"{cost.num_records:,.0f}",
            "" if cost.training_seconds is None else duration(cost.training_seconds),
            "" if cost.answering_seconds is None else duration(cost.answering_seconds),
        ]


def needs_of(arm: str, study: StudyFile) -> list[str]:
    """The variants whose training a variant needs, itself included, each after those that it needs."""
    is_routed = arm in study.routes
    before = study.routes[arm].arms.values() if is_routed else study.arms[arm].needs
    found = dict.fromkeys(one for other in before for one in needs_of(other, study))
    return list(found if is_routed else found | {arm: None})


def _sum_of(costs: Sequence[Sequence[Cost | None]], name: str) -> float | None:
    """The mean over seeds of the sum over variants; None if a value is not known."""
    values: list[list[Any]] = [[getattr(one, name) if one else None for one in some] for some in costs]
    return None if any(value is None for some in values for value in some) else fmean(sum(some) for some in values)


def figures(comparison: Comparison, study: StudyFile, runs: Mapping[str, ReportedRun]) -> list[ArmFigures]:
    """The figures of all compared variants; without a baseline the first variant is one. `runs` are by name."""
    pairs = {pair.second: pair for pair in comparison.pairs if pair.first == comparison.candidates[0].name}
    costs = {name: Cost.of(run) for name, run in runs.items()}
    found = []
    for one in comparison.candidates:
        arm, pair = one.runs[0], pairs.get(one.name)
        scores = [runs[f"{arm}-{seed}"].scores for seed in one.seeds]
        made = ArmFigures(
            arm=arm,
            seeds=one.seeds,
            exact_match=one.exact_match,
            exact_match_by_seed=[score.overall.exact_match for score in scores if score],
            interval=one.interval,
            majority=one.majority,
            spread=one.spread,
            difference=pair.difference if pair else None,
            difference_interval=pair.interval if pair else None,
            p_holm=pair.p_holm if pair else None,
            is_distinguishable=bool(pair and pair.better),
            cost=ArmCost.of(arm, study, one.seeds, costs),
        )
        found.append(replace(made, sentence=_sentence(made, comparison)))
    return found


def _sentence(one: ArmFigures, comparison: Comparison) -> str:
    """The figures of a variant as a person would write them into a paper."""
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


def arms_table(found: Sequence[ArmFigures], majority: str) -> Table:
    """All figures of the variants; `majority` says whose the majority answers are."""
    first = found[0].arm
    note = (
        "Exact match (the answer equals the reference) is the mean over seeds, with its 95% interval over images. "
        "Majority: always the question's most frequent training answer, no image seen. Points: percentage points above "
        f"{first}, with their 95% interval and the p of sign flips by image; Holm's correction raises p because "
        "several variants are tested. Seeds: points between the best and the worst. Records are those that are trained "
        "on, over all epochs; records and training are of one seed, with the variants that the variant starts from or "
        f"is routed to. {majority}"
    )
    header = (
        "variant",
        "exact match",
        "its 95% interval",
        "majority",
        f"points above {first}",
        "interval of the points",
    )
    figures: list[dict[str, Any]] = [
        {"arm": one.arm, "exact_match": one.exact_match, "majority": one.majority}
        | _ends("interval", one.interval)
        | {"difference": one.difference}
        | _ends("difference", one.difference_interval)
        | {"p_holm": one.p_holm, "spread": one.spread, "num_records": one.cost.num_records}
        | {name: getattr(one.cost, name) for name in ("training_seconds", "answering_seconds")}
        for one in found
    ]
    more = ("p (Holm)", "seeds differ by", "records", "training", "answering")
    return Table("arms", f"Variants against {first}", note, header + more, [one.row() for one in found], figures)


Groups = dict[str, dict[str, dict[str, float]]]
"""By grouping and group: how many questions, what the majority answers score, and each variant."""


def scores_of_groups(found: Sequence[ArmFigures], answers: Mapping[str, Run]) -> Groups:
    """Exact match of each variant by question and by stage, as the mean over its seeds."""
    groups: Groups = {}
    for by in ("question", "stage"):
        of_arms = [[scores_by(answers[f"{one.arm}-{seed}"].predictions, by) for seed in one.seeds] for one in found]
        first = of_arms[0][0]
        most = sorted(first, key=lambda name: -first[name].num_questions)[:MAX_GROUPS]
        groups[by] = {
            name: {"num_questions": first[name].num_questions, "majority": first[name].majority}
            | {
                one.arm: fmean(scores[name].exact_match for scores in seeds)
                for one, seeds in zip(found, of_arms, strict=True)
            }
            for name in (most if by == "question" else sorted(first, key=lambda stage: (len(stage), stage)))
        }
    return groups


def group_tables(groups: Groups) -> list[Table]:
    """A table of the questions, and one of the stages if there are any."""
    found = []
    for by, scores in groups.items():
        if scores:
            arms = [name for name in next(iter(scores.values())) if name not in ("num_questions", "majority")]
            names = ("majority", *arms)
            lines = [
                [name, f"{one['num_questions']:,}", *(f"{one[key]:.1%}" for key in names)]
                for name, one in scores.items()
            ]
            figures = [{by: name} | one for name, one in scores.items()]
            note = "Exact match of each variant, as the mean over its seeds, beside that of the majority answers."
            title = f"Exact match by {by}"
            found.append(Table(f"{by}s", title, note, (by, "asked", *names), lines, figures))
    return found


FORGETTING_NOTE = (
    "Exact match of the questions of each stage after each variant of the sequence, as the mean over seeds. "
    "Forgetting: the best of the earlier variants less the last one, in points; below 0 the last one is better."
)


@dataclass(frozen=True)
class Forgetting:
    """The matrix of one sequence of trainings."""

    arms: list[str]
    """The phases: the variants of the sequence, in order."""
    seeds: list[int]
    stages: list[str]
    exact_match: list[list[float]]
    """After each phase, of each stage."""
    forgotten: list[float]
    """The best of the earlier phases less the last one, of each stage."""

    def table(self) -> Table:
        """A line for each phase, and one for what is forgotten."""
        lines = [
            [arm, *(f"{share:.1%}" for share in line)] for arm, line in zip(self.arms, self.exact_match, strict=True)
        ]
        lines.append(["forgetting", *(f"{100 * points:+.1f}" for points in self.forgotten)])
        names = [f"stage {stage}" for stage in self.stages]
        figures: list[dict[str, Any]] = [
            {"after": after, **dict(zip(names, line, strict=True))}
            for after, line in zip([*self.arms, "forgetting"], [*self.exact_match, self.forgotten], strict=True)
        ]
        title = f"Forgetting: {' -> '.join(self.arms)}"
        note = f"{FORGETTING_NOTE} Seeds: {listed(list(map(str, self.seeds)))}."
        return Table(f"forgetting-{self.arms[-1]}", title, note, ("after", *names), lines, figures)


def chains(study: StudyFile) -> list[list[str]]:
    """The sequences of a study: its variants that no other one starts from, each after all that precede it.

    A variant of no epochs answers with the adapter of another one, and is no phase.
    """
    starts = {name: arm.starts_from for name, arm in study.trained.items() if arm.changes.get("train.epochs") != 0}
    return [phases_of(name, study) for name in starts if starts[name] and name not in starts.values()]


def phases_of(arm: str, study: StudyFile) -> list[str]:
    """The variants of a sequence up to this one, in order."""
    before = study.arms[arm].starts_from
    return [*(phases_of(before, study) if before else []), arm]


def find_forgetting(study: StudyFile, answers: Mapping[str, Run]) -> list[Forgetting]:
    """The matrix of each sequence whose questions have stages; `answers` are those of complete runs, by name."""
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


def context_table(one: ContextScores) -> Table:
    """A line for all questions of a variant, and one for each stage."""
    found = one.exact_match | one.differences
    figures = []
    for group, number in one.num_questions.items():
        line: dict[str, Any] = {"questions": group, "num_questions": number}
        for name in (*KINDS, *PAIRS):
            column, estimate = name.replace(" - ", "_less_"), found.get(name, {}).get(group)
            line |= {column: estimate.value if estimate else None}
            line |= _ends(column, estimate.interval if estimate else None)
        figures.append(line)
    lines = [[group, *map(_with_interval, cells)] for group, cells in context_cells(one).items()]
    note = "Exact match by whose answers to earlier questions the prompts have, with 95% intervals over images."
    title = f"Earlier answers in the prompts: {one.title}"
    return Table(f"contexts-{one.name}", title, note, CONTEXTS_HEADER, lines, figures)


def context_text(one: ContextScores) -> str:
    """The same in 80 columns, where only differences have intervals; and the commands that ask what is absent."""
    lines = [
        [group, *(words for words, _ in cells[: len(KINDS)]), *map(_with_interval, cells[len(KINDS) :])]
        for group, cells in context_cells(one).items()
    ]
    missing = [f"not asked yet; run: {line}" for line in one.not_asked]
    title = f"{one.title} with predicted, reference and no earlier answers in the prompts"
    header = ("", *CONTEXTS_HEADER[1 : len(KINDS) + 1], "pred. - none", "ref. - pred.")
    return "\n".join([title, table(header, lines), *missing])


def _with_interval(cell: Cell) -> str:
    words, interval = cell
    return f"{words} [{interval}]" if interval else words
