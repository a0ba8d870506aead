"""The parts of a report on training: losses, learning rate and exact match over steps; and what the run cost.

Design: while training, exact match is measured on some validation questions; after it, on the evaluated split. The two
are not comparable, so they have a panel each. All cost is recorded by the phases; nothing is estimated. The speed
beside plain training is that of `lookonce bench step`, if its JSON was saved as bench.json in the run folder. GPU hours
count the GPUs that the training could use, since their number is recorded and that of its processes is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lookonce.eval.scores.metrics import read_metrics
from lookonce.files import read_object
from lookonce.page import key, table
from lookonce.plots import Line, Panel, line_plot, node
from lookonce.report.runs import Part, ReportedRun
from lookonce.run.folder import RunFolder, Trained
from lookonce.run.log_file import Curve, Curves, smoothed
from lookonce.text import duration, faster, size

CURVES = "Curves"
NUM_COLOURS = 6
"""The page's style sheet has this many colours for lines; more runs are not drawn."""


def curves(runs: Sequence[ReportedRun]) -> Part:
    """One plot with all runs that have a log."""
    drawn = [(run, _finite(run.curves)) for run in runs]
    drawn = [(run, found) for run, found in drawn if found.loss or found.validation_loss]
    if not drawn:
        return Part("curves", CURVES, "No training has logged a loss.")
    text = " ".join([_curves_text(len(drawn)), *(sentence for run, found in drawn for sentence in _best(run, found))])
    drawn = drawn[:NUM_COLOURS]
    names = [run.name for run, _ in drawn]
    plot = line_plot("", "step", [*_losses([found for _, found in drawn]), *_scores(drawn)])
    plot.set("aria-label", f"curves of {', '.join(names)}")
    content = [key(names, "main"), node("figure", plot, class_="curves")]
    return Part("curves", CURVES, text, {run.name: _curves_numbers(run, found) for run, found in drawn}, content)


def _curves_text(number: int) -> str:
    faint = " faint: each logged value;" if number == 1 else ""
    first = f" The first {NUM_COLOURS} runs." if number > NUM_COLOURS else ""
    return f"Lines: the mean training loss over a 25th of the log;{faint} circles: validation loss.{first}"


def _best(run: ReportedRun, found: Curves) -> Iterator[str]:
    """The best of the measurements while training."""
    if found.best:
        yield f"{run.name}: lowest validation loss {found.best[1]:.4f} at step {found.best[0]:,}."
    if found.most_right:
        step, share = found.most_right
        yield f"{run.name}: highest exact match while training {share:.1%} at step {step:,}."


def _finite(found: Curves) -> Curves:
    """The curves without values that are not finite, which have no place in a plot."""
    drawn = (found.loss, found.validation_loss, found.learning_rate, found.exact_match)
    return Curves(
        *(
            {step: value for step, value in curve.items() if isinstance(value, int | float) and math.isfinite(value)}
            for curve in drawn
        )
    )


def _losses(found: Sequence[Curves]) -> list[Panel]:
    """The losses of all runs, and below them the learning rates."""
    lines = [
        line for number, one in enumerate(found, start=1) for line in _lines(one, number, is_alone=len(found) == 1)
    ]
    lows, highs = zip(*(one.loss_range() for one in found), strict=True)
    rates = [Line("", list(one.learning_rate.items()), "main", number) for number, one in enumerate(found, start=1)]
    highest = max((rate for one in found for rate in one.learning_rate.values()), default=0.0) or 1.0
    return [Panel("loss", lines, min(lows), max(highs), 400), Panel("learning rate", rates, 0.0, highest, 90)]


def _lines(found: Curves, colour: int, *, is_alone: bool) -> list[Line]:
    faint = [Line("", list(found.loss.items()), "faint", colour)] if is_alone else []
    validation = [Line("", list(found.validation_loss.items()), "marked", colour)] if found.validation_loss else []
    return [*faint, Line("", list(smoothed(found.loss).items()), "main", colour), *validation]


def _scores(drawn: Sequence[tuple[ReportedRun, Curves]]) -> list[Panel]:
    """Exact match while training, and after shorter trainings and the last; nothing if no run has two of them."""
    return [
        *_shares("exact match while training", [found.exact_match for _, found in drawn]),
        *_shares("exact match", [measured(run) for run, _ in drawn]),
    ]


def _shares(name: str, found: Sequence[Curve]) -> list[Panel]:
    points = [list(curve.items()) for curve in found]
    lines = [Line("", some, "marked", number) for number, some in enumerate(points, start=1) if len(some) > 1]
    return [Panel(name, lines, 0.0, 1.0, 150)] if lines else []


def measured(run: ReportedRun) -> dict[int, float]:
    """The exact match after some steps, of the training before it was extended and of the last one."""
    if run.folder is None:
        return {}
    found = {}
    for folder in (*run.folder.folder.glob("steps-*"), run.folder.folder):
        results = RunFolder(folder)
        trained = results.read_trained() if results.trained.exists() else None
        if isinstance(trained, Trained) and (metrics := read_metrics(results, run.split)):
            found[trained.num_steps] = metrics["overall"]["exact_match"]
    return dict(sorted(found.items()))


def _curves_numbers(run: ReportedRun, found: Curves) -> dict[str, Any]:
    names = ("loss", "validation_loss", "learning_rate")
    during = {"exact_match_while_training": found.exact_match, "most_right": found.most_right}
    return {name: getattr(found, name) for name in names} | {"best": found.best, "exact_match": measured(run)} | during


COST = "Cost"
BENCH = "bench.json"
"""The file in the run folder into which a user may save `lookonce bench step RUN.yaml --json`."""
NOT_MEASURED = (
    "The speed beside plain training is not recorded here; to measure it: "
    f"lookonce bench step RUN.yaml --json > RUN_FOLDER/{BENCH}"
)


@dataclass(frozen=True)
class Cost:
    """What a run cost; None where it is not recorded."""

    startup_seconds: dict[str, float]
    """Seconds of each piece of work before the first step."""
    cache_seconds: float | None
    """Encoding of the cache, all workers together."""
    training_seconds: float | None
    first_step: int
    """The step from which the training was resumed; its seconds are those since then."""
    answering_seconds: float | None
    num_answered: int
    """Questions that were answered in these seconds."""
    num_gpus: int | None
    gpu_hours: float | None
    """Hours of training and answering on GPUs; None on a CPU."""
    memory_gb: float | None
    """The most that PyTorch reserved on a GPU."""
    num_steps: int | None
    num_samples: int | None
    ms_per_sample: float | None
    tokens_per_second: float | None
    """The median of the log."""
    wait_share: float | None
    """The share of the training that waited for data."""
    cache_bytes: int | None
    adapter_bytes: int | None
    speed: dict[str, float]
    """How many times faster than the first variant each variant of the benchmark is."""

    @classmethod
    def of(cls, run: ReportedRun) -> Cost:
        trained, summary, answering = run.trained, run.summary, run.answering
        gpus = run.environment.get("gpus")
        seconds, first_step, samples = trained.get("seconds"), trained.get("first_step", 0), trained.get("num_samples")
        startup = trained.get("startup_seconds", {})
        busy = (seconds or 0) + (answering.get("seconds") or 0)
        rates = [line["tokens_per_second"] for line in run.log if line.get("tokens_per_second")]
        return cls(
            startup_seconds=startup,
            cache_seconds=summary.get("encode_seconds"),
            training_seconds=seconds,
            first_step=first_step,
            answering_seconds=answering.get("seconds") if answering.get("num_answered") else None,
            num_answered=answering.get("num_answered", 0),
            num_gpus=None if gpus is None else len(gpus),
            gpu_hours=len(gpus) * busy / 3600 if gpus and busy else None,
            memory_gb=max((line["memory_gb"] for line in run.log if line.get("memory_gb")), default=None),
            num_steps=trained.get("num_steps"),
            num_samples=samples,
            ms_per_sample=1e3 * seconds / samples if seconds and samples and not first_step else None,
            tokens_per_second=median(rates) if rates else None,
            wait_share=trained.get("wait_share"),
            cache_bytes=summary.get("cache_bytes"),
            adapter_bytes=_size_of(run.folder.adapter) if run.folder else None,
            speed=_speed(read_object(run.folder.folder / BENCH)) if run.folder else {},
        )


def cost(runs: Sequence[ReportedRun]) -> Part:
    """A line for each figure, with a column for each run."""
    found = {run.name: Cost.of(run) for run in runs}
    lines = [[words, *cells] for words, show in LINES.items() if any(cells := [show(one) for one in found.values()])]
    if not lines:
        return Part("cost", COST, "Nothing is recorded.")
    text = "" if any(one.speed for one in found.values()) else NOT_MEASURED
    numbers = {name: asdict(one) for name, one in found.items()}
    return Part("cost", COST, text, numbers, [table(("figure", *found), lines)])


def _optional(name: str, shown: Callable[[Any], str]) -> Callable[[Cost], str]:
    """Shows a figure if it is known."""

    def show(one: Cost) -> str:
        value = getattr(one, name)
        return "" if value is None else shown(value)

    return show


def _training_time(one: Cost) -> str:
    since = f" since step {one.first_step:,}" if one.first_step else ""
    return "" if one.training_seconds is None else f"{duration(one.training_seconds)}{since}"


def _answering_time(one: Cost) -> str:
    if one.answering_seconds is None:
        return ""
    each = 1e3 * one.answering_seconds / one.num_answered
    return f"{duration(one.answering_seconds)}, {each:.1f} ms a question"


def _gpu_hours(one: Cost) -> str:
    if one.num_gpus == 0:
        return "none, on a CPU"
    return "" if one.gpu_hours is None else f"{one.gpu_hours:.2f} on {one.num_gpus} GPU"


def _speed_text(one: Cost) -> str:
    first, *others = one.speed or [""]
    return ", ".join(f"{name} {faster(one.speed[name])} than {first}" for name in others)


LINES: Mapping[str, Callable[[Cost], str]] = {
    "encoding the cache": _optional("cache_seconds", duration),
    "before the first step": lambda one: duration(sum(one.startup_seconds.values())) if one.startup_seconds else "",
    "training": _training_time,
    "answering": _answering_time,
    "GPU hours": _gpu_hours,
    "memory reserved": _optional("memory_gb", lambda value: f"{value:.1f} GB"),
    "steps": _optional("num_steps", lambda value: f"{value:,}"),
    "samples": _optional("num_samples", lambda value: f"{value:,}"),
    "ms a sample": _optional("ms_per_sample", lambda value: f"{value:.2f}"),
    "tokens per second": _optional("tokens_per_second", lambda value: f"{value:,.0f}"),
    "waiting for data": _optional("wait_share", lambda value: f"{value:.1%}"),
    "cache": _optional("cache_bytes", size),
    "adapter": _optional("adapter_bytes", size),
    "measured speed": _speed_text,
}


def _size_of(folder: Path) -> int | None:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else None


def _speed(bench: dict[str, Any]) -> dict[str, float]:
    measured = {one["way"]: one["ms_per_sample"] for one in bench.get("ways", [])}
    return {name: next(iter(measured.values())) / value for name, value in measured.items()}
