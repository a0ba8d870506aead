"""Figures of each arm: its score, how it compares with the baseline arm, what it cost, and all of it in a sentence.

Design: scores and differences are those of `lookonce compare`. The cost of an arm is that of its own training and of
all that it needs: the arms before it in its chain, or those that it is routed to. What several arms need counts for
each of them, since each alone would have to pay it. The cost of answering is that of its own answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from lookonce.eval.comparison.compare import Candidate, Comparison, Pair
from lookonce.eval.comparison.report import shown_p
from lookonce.eval.statistics.intervals import Interval
from lookonce.page import sentences, table
from lookonce.report.runs import Part, ReportedRun
from lookonce.report.training import Cost
from lookonce.study.file import StudyFile
from lookonce.study.report.tables import Table, ends
from lookonce.text import count, duration

SCORES = ("arm", "exact match", "95% interval", "points", "95% interval", "p (Holm)", "seeds differ by")
HEADER = (*SCORES, "records", "training", "answering")
FIGURES = ("num_records", "training_seconds", "answering_seconds")
NOTE = (
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
    shown = [table(HEADER, [one.row() for one in found]), sentences([one.sentence for one in found])]
    return Part("arms", f"Arms against {found[0].arm}", f"{NOTE} {note}", [asdict(one) for one in found], shown)
