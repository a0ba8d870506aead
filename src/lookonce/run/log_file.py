"""What a training writes while it runs: `log.jsonl` as curves by step, `drawn.jsonl`, and `progress.json`. log_files.py
writes them.

A line that is broken is left out: a killed process may have written half of its last one. Of several values for one
step the last counts. Reading costs 5 ms per 1,000 lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
OF_REWARDS = ("reward", "reward_spread", "mixed_share", "entropy", "answer_tokens", "kl")
NAMES = ("loss", "eval_loss", "learning_rate", "eval_exact_match", "eval_score", *OF_REWARDS)
"""The keys of the curves in a log, in their order."""
Curve = dict[int, float]
"""Values by step, in order."""


@dataclass(frozen=True)
class Curves:
    loss: Curve = field(default_factory=dict)
    """The mean of the steps since the line before; empty in a training by rewards, whose loss says nothing of them."""
    validation_loss: Curve = field(default_factory=dict)
    learning_rate: Curve = field(default_factory=dict)
    exact_match: Curve = field(default_factory=dict)
    """The share of validation questions that were answered right while training."""
    score: Curve = field(default_factory=dict)
    """What their answers scored by `eval.metric`; empty if that is exact match."""
    reward: Curve = field(default_factory=dict)
    """In a training by rewards, the mean of the answers drawn since the line before; so are the others."""
    reward_spread: Curve = field(default_factory=dict)
    """The standard deviation of the rewards of a question's answers."""
    mixed_share: Curve = field(default_factory=dict)
    """The share of the questions whose answers have different rewards, so that they teach something."""
    entropy: Curve = field(default_factory=dict)
    """Of each drawn token."""
    answer_tokens: Curve = field(default_factory=dict)
    kl: Curve = field(default_factory=dict)
    """The KL divergence to the model at the start; empty without `grpo.kl`."""

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
    by_name = [_curve(lines, name) for name in NAMES]
    curves = Curves(*by_name)
    return replace(curves, loss={}) if curves.reward else curves


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log that are whole, without what is null: numbers that were not finite."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            if _is_whole(value := _without_nulls(parse_json(line))):
                yield value


def _without_nulls(value: Any) -> Any:
    return {name: number for name, number in value.items() if number is not None} if isinstance(value, dict) else value


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
    points = [(line["step"], line[name]) for line in lines if name in line]
    return dict(sorted(points, key=lambda point: point[0]))


PHASES = ("sampling", "rewarding", "training")
"""What the steps of a training by rewards do."""
AT_ENDS = 0.2
"""The share of the steps whose rewards are the first ones, and the last ones."""


@dataclass(frozen=True)
class Rewards:
    """A training by rewards in figures."""

    num_questions: int
    """Questions to which answers were drawn; those of which nothing was learned count."""
    first: float
    """The mean reward of the first fifth of the steps."""
    last: float
    """That of the last fifth."""
    mixed_share: float
    """The share of the questions whose answers have different rewards."""
    seconds: dict[str, float]
    """Of sampling, rewarding and training."""

    def time_text(self) -> str:
        total = sum(self.seconds.values()) or 1.0
        return ", ".join(f"{seconds / total:.0%} {phase}" for phase, seconds in self.seconds.items())


def read_rewards(path: Path) -> Rewards | None:
    """The figures of a training by rewards, by its log; None of another one."""
    lines = list(read_lines(path))
    drawn = [line for line in lines if line.get("questions_drawn", 0) > 0 and {"reward", "mixed_share"} <= line.keys()]
    if not drawn:
        return None
    last_step = drawn[-1]["step"]
    first = [line for line in drawn if line["step"] <= AT_ENDS * last_step] or drawn[:1]
    last = [line for line in drawn if line["step"] > (1 - AT_ENDS) * last_step] or drawn[-1:]
    return Rewards(
        num_questions=int(sum(line["questions_drawn"] for line in drawn)),
        first=_mean(first, "reward"),
        last=_mean(last, "reward"),
        mixed_share=_mean(drawn, "mixed_share"),
        seconds={phase: sum(line.get(f"{phase}_seconds", 0.0) for line in lines) for phase in PHASES},
    )


def _mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    """The mean over the questions of some lines."""
    total = sum(line["questions_drawn"] for line in lines)
    return float(sum(line[key] * line["questions_drawn"] for line in lines) / total)


@dataclass(frozen=True)
class DrawnAnswer:
    """An answer that a model drew in a training by rewards."""

    text: str
    reward: float
    cut: bool
    """Whether it was cut off at `grpo.max_new_tokens`."""


@dataclass(frozen=True)
class DrawnQuestion:
    """A question of a logged step, with the answers to it: a line of the file."""

    __pydantic_config__: ClassVar[ConfigDict] = {"allow_inf_nan": False}

    step: int
    origin: str
    images: list[str]
    question: str
    references: list[str]
    answers: list[DrawnAnswer]


_DRAWN = TypeAdapter(DrawnQuestion)


def read_drawn(path: Path) -> list[DrawnQuestion]:
    """The lines of a file of drawn answers that are whole; none if there is no file."""
    drawn = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                drawn.append(_DRAWN.validate_python(parse_json(line)))
    return drawn


End = Literal["", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Progress:
    """The content of progress.json."""

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
    reward: float | None = None
    """The mean reward of the answers drawn since the line before, in a training by rewards; None in another one."""
    mixed_share: float | None = None
    """The share of their questions whose answers have different rewards."""
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
