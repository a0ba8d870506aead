"""How arms learn: validation loss, and exact match while training, over samples and over minutes.

Design: an arm is drawn with all phases of its chain, one behind another, since it costs what they cost. Values are
means over the seeds, at the steps that all of them have. Minutes are those of training, from the times in the log; a
training that was resumed has none. There are few colours, so there may be several figures, with the first arm in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Literal
from xml.etree.ElementTree import Element

from lookonce.page import key
from lookonce.plots import Line, Panel, line_plot, node
from lookonce.report.runs import Part, ReportedRun
from lookonce.report.training import NUM_COLOURS
from lookonce.run.log_file import read_lines
from lookonce.study.file import StudyFile

TITLE = "Learning curves"
NOTE = (
    "Means over the seeds. A chain is drawn with all its phases, each behind the one before; a new phase has another "
    "loss at once."
)
NONE = "No run has a validation loss."
METRICS = {"validation_loss": "eval_loss", "exact_match": "eval_exact_match"}
"""The log's names of what is drawn."""
NAMES = {"validation_loss": "validation loss", "exact_match": "exact match while training"}
Axis = Literal["samples", "minutes"]


@dataclass(frozen=True)
class Measured:
    """What was measured while training, after this many samples."""

    samples: float
    minutes: float | None
    """None if a training was resumed, which may have waited in between."""
    validation_loss: float | None
    exact_match: float | None


@dataclass(frozen=True)
class ArmCurve:
    """What was measured of an arm and of the phases before it, in order."""

    arm: str
    phases: list[str]
    points: list[Measured]

    def line(self, metric: str, axis: Axis, colour: int) -> Line:
        points = [(getattr(one, axis), getattr(one, metric)) for one in self.points]
        return Line("", [point for point in points if None not in point], "marked", colour)


def learning_curves(study: StudyFile, arms: Sequence[str], runs: Mapping[str, ReportedRun]) -> list[ArmCurve]:
    """The curves of those arms that are trained; `runs` are the complete ones, by name."""
    found = []
    for arm in (arm for arm in arms if arm in study.trained):
        phases = _phases(arm, study)
        seeds = [seed for seed in study.seeds if all(f"{phase}-{seed}" in runs for phase in phases)]
        points = _joined([_mean([_measured(runs[f"{phase}-{seed}"]) for seed in seeds]) for phase in phases])
        if points:
            found.append(ArmCurve(arm, phases, points))
    return found


def _phases(arm: str, study: StudyFile) -> list[str]:
    before = study.arms[arm].starts_from
    return [*(_phases(before, study) if before else []), arm]


def _measured(run: ReportedRun) -> dict[int, Measured]:
    """What a run has logged, by step, and at its last step where the next phase begins."""
    if run.folder is None:
        return {}
    trained, lines = run.folder.read_trained(), list(read_lines(run.folder.log))
    end = lines[-1].get("time") if lines and not trained.first_step else None
    found: dict[int, Measured] = {}
    for line in lines:
        values = {metric: line.get(name) for metric, name in METRICS.items()}
        if any(value is not None for value in values.values()):
            seconds = trained.seconds - (end - line["time"]) if end and "time" in line else None
            samples = trained.num_samples * line["step"] / max(trained.num_steps, 1)
            found[line["step"]] = Measured(samples, None if seconds is None else max(seconds, 0) / 60, **values)
    return found


def _mean(seeds: Sequence[Mapping[int, Measured]]) -> list[Measured]:
    """The means over seeds, at the steps that all have."""
    steps = sorted(set(seeds[0]).intersection(*seeds[1:])) if seeds else []
    found = []
    for step in steps:
        some = [one[step] for one in seeds]
        found.append(
            Measured(
                fmean(one.samples for one in some),
                _mean_of([one.minutes for one in some]),
                _mean_of([one.validation_loss for one in some]),
                _mean_of([one.exact_match for one in some]),
            )
        )
    return found


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _joined(phases: Sequence[Sequence[Measured]]) -> list[Measured]:
    """The points of phases, each behind the last one of the phase before; none if a phase has none."""
    found: list[Measured] = []
    samples: float = 0
    minutes: float | None = 0
    for phase in phases:
        if not phase:
            return []
        found += [
            Measured(
                samples + one.samples,
                None if one.minutes is None or minutes is None else minutes + one.minutes,
                one.validation_loss,
                one.exact_match,
            )
            for one in phase
        ]
        samples, minutes = found[-1].samples, found[-1].minutes
    return found


def curves_part(found: Sequence[ArmCurve]) -> Part:
    """The curves as a part of the page."""
    if not found:
        return Part("learning_curves", TITLE, NONE)
    content = [element for some in _figures(found) for element in some]
    return Part("learning_curves", TITLE, NOTE, [asdict(one) for one in found], content)


def _figures(found: Sequence[ArmCurve]) -> list[list[Element]]:
    """Two plots for the first arm and as many others as there are colours."""
    first, *others = found
    size = NUM_COLOURS - 1
    groups = [[first, *others[start : start + size]] for start in range(0, max(len(others), 1), size)]
    return [[key([one.arm for one in group], "marked"), *_plots(group)] for group in groups]


def _plots(group: Sequence[ArmCurve]) -> list[Element]:
    plots = []
    axes: dict[Axis, str] = {"samples": "samples", "minutes": "minutes of training"}
    for axis, name in axes.items():
        panels = [panel for metric in METRICS if (panel := _panel(group, metric, axis))]
        if panels:
            plot = line_plot("", name, panels)
            plot.set("aria-label", f"{', '.join(one.arm for one in group)} over {name}")
            plots.append(node("figure", plot, class_="curves"))
    return plots


def _panel(group: Sequence[ArmCurve], metric: str, axis: Axis) -> Panel | None:
    lines = [one.line(metric, axis, number) for number, one in enumerate(group, start=1)]
    values = [value for line in lines for _, value in line.points]
    if not values:
        return None
    low, high = (0.0, 1.0) if metric == "exact_match" else (min(values), max(values))
    return Panel(NAMES[metric], lines, low, high, 260)
