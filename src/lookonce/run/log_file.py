"""What a training writes while it runs: `log.jsonl` as curves by step, and `progress.json`. log_files.py writes both.

Design: a line that is broken is left out, because a killed process may have written half of its last one, and a
training may be writing while the file is read. Of several values for one step the last counts. Costs 5 ms per 1,000
lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from lookonce.claim_file import Process, read_process_file
from lookonce.files import parse_json

MAX_STEP, MAX_TIME = 1 << 53, 1e11
"""Beyond the steps of any training, and the year 5000 in seconds since 1970."""
EARLY_SHARE = 0.05
"""Share of the steps that do not count for the range of losses that is drawn."""
SMALLEST_RANGE = 1e-4
NAMES = ("loss", "eval_loss", "learning_rate", "eval_exact_match", "eval_score")
"""The keys of the curves in a log, in their order."""
Curve = dict[int, float]
"""Values by step, in order."""


@dataclass(frozen=True)
class Curves:
    """What a training has logged."""

    loss: Curve = field(default_factory=dict)
    """The mean of the steps since the line before."""
    validation_loss: Curve = field(default_factory=dict)
    learning_rate: Curve = field(default_factory=dict)
    exact_match: Curve = field(default_factory=dict)
    """The share of validation questions that were answered right while training."""
    score: Curve = field(default_factory=dict)
    """What their answers scored by `eval.metric`; empty if that is exact match."""

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the lowest validation loss, and that loss; None if there was no validation."""
        return min(self.validation_loss.items(), key=lambda point: point[1], default=None)

    @property
    def highest(self) -> tuple[int, float] | None:
        """The first step with the highest score by `eval.metric`, and that; None if it was not measured."""
        return max((self.score or self.exact_match).items(), key=lambda point: point[1], default=None)

    def loss_range(self) -> tuple[float, float]:
        """The lowest and highest loss to draw, without the start, whose losses would flatten the rest."""
        smooth = smoothed(self.loss)
        begun = EARLY_SHARE * max([*smooth, *self.validation_loss], default=0)
        points = [*smooth.items(), *self.validation_loss.items()]
        losses = [loss for step, loss in points if step > begun] or [0.0]
        return min(losses), max(max(losses), min(losses) + SMALLEST_RANGE)


def smoothed(curve: Curve) -> Curve:
    """The mean over a 25th of the points, half of them before a point; of few points, the points themselves."""
    values, widest = list(curve.values()), len(curve) // 50
    sums = [0.0, *accumulate(values)]
    means: Curve = {}
    for index, step in enumerate(curve):
        before = min(widest, index)
        after = min(before, len(values) - 1 - index)
        means[step] = (sums[index + after + 1] - sums[index - before]) / (before + after + 1)
    return means


def read_curves(path: Path) -> Curves:
    """The curves of a log; empty if there is none."""
    lines = list(read_lines(path))
    return Curves(*(_curve(lines, name) for name in NAMES))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log that are whole."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            if _is_whole(value := parse_json(line)):
                yield value


def _is_whole(value: Any) -> bool:
    """Whether it is an object of numbers with a step, and with a time that a calendar has, if any."""
    return (
        isinstance(value, dict)
        and all(type(number) in (int, float) for number in value.values())
        and type(value.get("step")) is int
        and 0 <= value["step"] < MAX_STEP
        and 0 <= value.get("time", 0) < MAX_TIME
    )


def _curve(lines: Iterable[dict[str, Any]], name: str) -> Curve:
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return dict(sorted(points, key=lambda point: point[0]))


End = Literal["", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Progress:
    """The content of the file."""

    __pydantic_config__: ClassVar[ConfigDict] = {"allow_inf_nan": False}

    worker: Process
    began: float
    """When the training began, in seconds since 1970 by the trainer's clock."""
    phase: str = "loading"
    step: int = 0
    num_steps: int = 0
    """All steps of the training; 0 until their number is known."""
    first_step: int = 0
    """The step of the checkpoint from which the training resumed; 0 if it did not."""
    stepped_s: float = 0.0
    """Seconds since the last step ended, or since the training began."""
    loss: float | None = None
    validation_loss: float | None = None
    exact_match: float | None = None
    """The last one that was measured while training."""
    score: float | None = None
    """The same by `eval.metric`; None if that is exact match."""
    ms_per_sample: float | None = None
    eta_s: float | None = None
    """Estimated seconds for the remaining steps."""
    end: End = ""
    """How the training ended; empty while it runs."""
    reason: str = ""
    """Why it stopped or failed."""


_PROGRESS = TypeAdapter(Progress)


def read_progress(path: Path) -> Progress | None:
    """The progress of a training; None if the file is missing, unreadable or of another form."""
    return read_process_file(path, lambda **values: _PROGRESS.validate_python(values))
