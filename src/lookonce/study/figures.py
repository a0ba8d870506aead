"""Figures of the variants of a study: scores and costs, scores by question and stage, and forgetting; as tables.

Scores and differences are those of `lookonce compare`. The cost of a variant is that of its own training and of all
that it needs: the variants before it in its sequence, or those that it is routed to. What several need counts for each
of them, since each alone would have to pay it. The cost of answering is that of its own answers.

Each variant of a sequence has answered the questions of all stages, so forgetting is read off its predictions, as a
mean over the seeds of which all phases are complete. As files, tables are CSV with the figures as they are, and LaTeX
with the cells as the page shows them; LaTeX needs the packages booktabs and adjustbox.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from lookonce.datasets.text_files import write_csv
from lookonce.eval.compare import Comparison
from lookonce.eval.join import Run
from lookonce.eval.scores.metric import EXACT, name_of
from lookonce.eval.scores.prediction import MAX_GROUPS, scores_by
from lookonce.eval.statistics import Interval
from lookonce.files import atomic_write, write_text
from lookonce.page import render
from lookonce.report.contexts import HEADER as CONTEXTS_HEADER
from lookonce.report.contexts import ContextScores, context_cells, with_interval
from lookonce.report.runs import Cost, ReportedRun
from lookonce.settings import flatten
from lookonce.study.file import StudyFile
from lookonce.text import duration, listed, shown_p


class Table(NamedTuple):
    """A table, as it is shown and as figures."""

    name: str
    """The end of the names of its files."""
    title: str
    note: str
    """What the figures mean."""
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    """The cells as they are shown."""
    figures: Sequence[Mapping[str, Any]]
    """The figures of each line by the name of their column, as they are in --json."""

    def write(self, page: Path) -> list[Path]:
        """Write the figures as CSV, and the shown cells as LaTeX, beside a page; returns the paths."""
        csv, tex = (page.with_name(f"{page.stem}-{self.name}.{suffix}") for suffix in ("csv", "tex"))
        with atomic_write(csv) as temporary:
            write_csv(temporary, [(self.title, _columns(line)) for line in self.figures])
        write_text(tex, render("table.tex.jinja", table=self))
        return [csv, tex]


def _columns(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with a column for each; an interval has two."""
    columns: dict[str, Any] = {}
    for name, value in flatten(figures).items():
        is_interval = name.endswith("interval") and (value is None or isinstance(value, Interval))
        low, high = (value if is_interval else None) or (None, None)
        columns |= {f"{name}_low": low, f"{name}_high": high} if is_interval else {name: value}
    return columns


@dataclass(frozen=True)
class VariantCost:
    """The mean cost of a variant over its seeds; None where it is not recorded."""

    needs: list[str]
    """The variants whose training it needs, and itself if it is trained."""
    num_records: float | None
    """Records that one seed is trained on."""
    training_seconds: float | None
    """None also if a training was resumed, because its record has the time since then."""
    answering_seconds: float | None

    @classmethod
    def of(cls, variant: str, study: StudyFile, seeds: Sequence[int], costs: Mapping[str, Cost]) -> VariantCost:
        """`costs` are those of the runs by name, such as plain-42."""

        def mean(variants: Sequence[str], value: Callable[[Cost], float | None]) -> float | None:
            """The mean over seeds of the sum over variants; None if a value is not known."""
            costs_by_seed = [[costs.get(f"{name}-{seed}") for name in variants] for seed in seeds]
            values = [[value(cost) if cost else None for cost in of_seed] for of_seed in costs_by_seed]
            known_values = [[number for number in of_seed if number is not None] for of_seed in values]
            return fmean(map(sum, known_values)) if known_values == values else None

        needs = needs_of(variant, study)
        answering = [*study.routes[variant].variants.values()] if variant in study.routes else [variant]
        return cls(
            needs,
            mean(needs, lambda cost: cost.num_samples),
            mean(needs, lambda cost: None if cost.first_step else cost.training_seconds),
            mean([*dict.fromkeys(answering)], lambda cost: cost.answering_seconds),
        )


@dataclass(frozen=True)
class VariantFigures:
    variant: str
    seeds: list[int]
    exact_match: float
    metric: str
    """The metric that counts; all that follows is by it."""
    score: float
    score_by_seed: list[float]
    interval: Interval | None
    majority: float
    spread: float | None
    """The score of the best seed less that of the worst; None for one seed."""
    difference: float | None
    """The score less that of the baseline variant; None for that variant itself."""
    difference_interval: Interval | None
    p_holm: float | None
    is_distinguishable: bool
    cost: VariantCost

    def row(self) -> list[str]:
        cost = self.cost
        return [
            self.variant,
            f"{self.score:.1%}",
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


def needs_of(variant: str, study: StudyFile) -> list[str]:
    """The variants whose training a variant needs, itself included, each after those that it needs."""
    is_routed = variant in study.routes
    before = study.routes[variant].variants.values() if is_routed else study.variants[variant].needs
    needed = dict.fromkeys(name for other in before for name in needs_of(other, study))
    return list(needed if is_routed else needed | {variant: None})


def figures(comparison: Comparison, study: StudyFile, runs: Mapping[str, ReportedRun]) -> list[VariantFigures]:
    """The figures of all compared variants; without a baseline the first variant is one. `runs` are by name."""
    pairs = {pair.second: pair for pair in comparison.pairs if pair.first == comparison.candidates[0].name}
    costs = {name: Cost.of(run) for name, run in runs.items()}
    variants = []
    for candidate in comparison.candidates:
        variant, pair = candidate.runs[0], pairs.get(candidate.name)
        variants.append(
            VariantFigures(
                variant=variant,
                metric=comparison.metric,
                score_by_seed=[runs[f"{variant}-{seed}"].metrics["headline"]["score"] for seed in candidate.seeds],
                difference=pair.difference if pair else None,
                difference_interval=pair.interval if pair else None,
                p_holm=pair.p_holm if pair else None,
                is_distinguishable=bool(pair and pair.better),
                cost=VariantCost.of(variant, study, candidate.seeds, costs),
                **{
                    name: getattr(candidate, name)
                    for name in ("seeds", "exact_match", "score", "interval", "majority", "spread")
                },
            )
        )
    return variants


def variants_table(variants: Sequence[VariantFigures], majority: str) -> Table:
    """All figures of the variants; `majority` says whose the majority answers are."""
    first, measure = variants[0].variant, name_of(variants[0].metric)
    meaning = " (the answer equals the reference)" if variants[0].metric == EXACT else ""
    note = (
        f"{measure[0].upper()}{measure[1:]}{meaning} is the mean over seeds, with its 95% interval over images. "
        "Majority: always the question's most frequent training answer, no image seen. Points: percentage points above "
        f"{first}, with their 95% interval and the p of sign flips by image; Holm's correction raises p because "
        "several variants are tested. Seeds: points between the best and the worst. Records: those trained on, "
        "over all epochs. Records and training time are per seed, and include the variants that a variant starts from "
        f"or routes to. {majority}"
    )
    header = ("variant", measure, "its 95% interval", "majority", f"points above {first}")
    more = ("interval of the points", "p (Holm)", "seeds differ by", "records", "training", "answering")
    title, lines = f"Variants against {first}", [variant.row() for variant in variants]
    return Table("variants", title, note, header + more, lines, [asdict(variant) for variant in variants])


Groups = dict[str, dict[str, dict[str, float]]]
"""By grouping and group: how many questions, what the majority answers score, and each variant."""


def scores_of_groups(variants: Sequence[VariantFigures], answers: Mapping[str, Run]) -> Groups:
    """Exact match of each variant by question and by stage, as the mean over its seeds."""
    groups: Groups = {}
    for by in ("question", "stage"):
        scored = {
            variant.variant: [scores_by(answers[f"{variant.variant}-{seed}"].predictions, by) for seed in variant.seeds]
            for variant in variants
        }
        first = scored[variants[0].variant][0]
        most = sorted(first, key=lambda name: -first[name].num_questions)[:MAX_GROUPS]
        groups[by] = {
            name: {"num_questions": first[name].num_questions, "majority": first[name].majority}
            | {variant: fmean(scores[name].exact_match for scores in seeds) for variant, seeds in scored.items()}
            for name in (most if by == "question" else _in_order(first))
        }
    return groups


def _in_order(stages: Mapping[str, object]) -> list[str]:
    return sorted(stages, key=lambda stage: (len(stage), stage))


def group_tables(groups: Groups) -> list[Table]:
    """A table of the questions, and one of the stages if there are any."""
    tables = []
    for by, scores in groups.items():
        if scores:
            names = [name for name in next(iter(scores.values())) if name != "num_questions"]
            lines = [
                [name, f"{score['num_questions']:,}", *(f"{score[key]:.1%}" for key in names)]
                for name, score in scores.items()
            ]
            note = "Exact match of each variant, as the mean over its seeds, beside that of the majority answers."
            figures = [{by: name} | score for name, score in scores.items()]
            tables.append(Table(f"{by}s", f"Exact match by {by}", note, (by, "asked", *names), lines, figures))
    return tables


FORGETTING_NOTE = (
    "Exact match of the questions of each stage after each variant of the sequence, as the mean over seeds. "
    "Forgetting: the best of the earlier variants less the last one, in points; below 0 the last one is better."
)


@dataclass(frozen=True)
class Forgetting:
    """Exact match of each stage after each phase of one sequence of trainings."""

    variants: list[str]
    """The phases: the variants of the sequence, in order."""
    seeds: list[int]
    stages: list[str]
    exact_match: list[list[float]]
    """After each phase, of each stage."""
    forgetting: list[float]
    """The best of the earlier phases less the last one, of each stage."""

    def table(self) -> Table:
        """A line for each phase, and one for forgetting."""
        shares = dict(zip(self.variants, self.exact_match, strict=True))
        lines = [[variant, *(f"{share:.1%}" for share in line)] for variant, line in shares.items()]
        lines.append(["forgetting", *(f"{100 * points:+.1f}" for points in self.forgetting)])
        title = f"Forgetting: {' -> '.join(self.variants)}"
        note = f"{FORGETTING_NOTE} Seeds: {listed(list(map(str, self.seeds)))}."
        names = [f"stage {stage}" for stage in self.stages]
        figures = [
            {"after": after} | dict(zip(names, line, strict=True))
            for after, line in (shares | {"forgetting": self.forgetting}).items()
        ]
        return Table(f"forgetting-{self.variants[-1]}", title, note, ("after", *names), lines, figures)


def sequences(study: StudyFile) -> list[list[str]]:
    """The sequences of a study: its variants that no other one starts from, each after all that precede it.

    A variant with zero epochs answers with the adapter of another one, and is no phase.
    """
    trained = study.trained.items()
    starts = {name: variant.starts_from for name, variant in trained if variant.changes.get("train.epochs") != 0}
    return [_phases(name, study) for name in starts if starts[name] and name not in starts.values()]


def _phases(variant: str, study: StudyFile) -> list[str]:
    """The variants of a sequence up to this one, in order."""
    before = study.variants[variant].starts_from
    return [*(_phases(before, study) if before else []), variant]


def find_forgetting(study: StudyFile, answers: Mapping[str, Run]) -> list[Forgetting]:
    """The matrix of each sequence whose questions have stages; `answers` are those of complete runs, by name."""
    return [forgetting for sequence in sequences(study) if (forgetting := _matrix(sequence, study.seeds, answers))]


def _matrix(sequence: list[str], seeds: Sequence[int], answers: Mapping[str, Run]) -> Forgetting | None:
    seeds = [seed for seed in seeds if all(f"{variant}-{seed}" in answers for variant in sequence)]
    scored = [
        [scores_by(answers[f"{variant}-{seed}"].predictions, "stage") for seed in seeds] for variant in sequence
    ]  # by phase, seed and stage
    if not seeds or not scored[0][0]:
        return None
    stages = _in_order(scored[0][0])
    shares = [[fmean(by_stage[stage].exact_match for by_stage in phase) for stage in stages] for phase in scored]
    lost = [max(earlier) - last for *earlier, last in zip(*shares, strict=True)]
    return Forgetting(sequence, list(seeds), stages, shares, lost)


def context_table(scores: ContextScores) -> Table:
    """A line for all questions of a variant with `data.context`, and one for each stage."""
    estimates = (scores.exact_match | scores.differences).items()
    figures = [
        {"questions": group, "num_questions": number} | {name: asdict(by_group[group]) for name, by_group in estimates}
        for group, number in scores.num_questions.items()
    ]
    lines = [[group, *map(with_interval, cells)] for group, cells in context_cells(scores).items()]
    note = "Exact match by whose answers to earlier questions the prompts have, with 95% intervals over images."
    title = f"Earlier answers in the prompts: {scores.title}"
    return Table(f"contexts-{scores.name}", title, note, CONTEXTS_HEADER, lines, figures)
