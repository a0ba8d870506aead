"""The summary at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lookonce.environment import program, shorten
from lookonce.eval.scores.metric import EXACT, Headline
from lookonce.eval.scores.metrics import Evaluation
from lookonce.eval.statistics import Interval
from lookonce.run.folder import RunFolder, Trained, read_form
from lookonce.run.log_file import Rewards, read_curves, read_rewards
from lookonce.text import count, duration, rows, shell, size

if TYPE_CHECKING:
    from lookonce.run.open import OpenRun


OF_TRAINING = ("num_steps", "first_step", "num_samples", "num_too_long", "wait_share", "startup_seconds", "ended_early")
"""Figures of a summary that are those of the training."""


@dataclass(frozen=True)
class Summary:
    run: str
    num_files: int
    num_distinct: int
    cache: str
    cache_bytes: int
    num_shards: int
    encode_seconds: float
    num_steps: int
    first_step: int
    num_samples: int
    num_too_long: int
    train_seconds: float
    wait_share: float
    split: str
    num_questions: int
    exact_match: float | None
    majority: float | None
    adapter: str
    next_command: str
    best_validation_loss: float | None = None
    best_validation_step: int | None = None
    startup_seconds: dict[str, float] = field(default_factory=dict)
    exact_match_interval: Sequence[float] | None = None
    """The ends of the 95 % interval of the exact match; None if there are too few images."""
    headline: Headline | None = None
    """The score by `eval.metric`; None if nothing is evaluated."""
    rewards: Rewards | None = None
    ended_early: str = ""
    report: str | None = None
    """The page that shows the run; None if it could not be written."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, folder: RunFolder) -> Summary:
        """The summary of a finished run; raises RunFolderError if the file is broken."""
        return read_form(folder.summary, cls, "remove it, and write it again with: lookonce train RUN.yaml --resume")

    def text(self) -> str:
        cache = f"{size(self.cache_bytes)} of features in {count(self.num_shards, 'shard')}"
        lines = [
            ("images", f"{count(self.num_files, 'file')}, {self.num_distinct:,} distinct"),
            ("cache", f"{cache}, encoded once in {duration(self.encode_seconds)}"),
            ("", self.cache),
            ("training", self._training()),
        ]
        if self.startup_seconds:
            lines.append(("", self._startup()))
        if self.rewards:
            lines += [("reward", self._rewarded(self.rewards)), ("", f"time of the steps: {self.rewards.time_text()}")]
        if self.best_validation_loss is not None:
            best = f"lowest {self.best_validation_loss:.4f}, at step {self.best_validation_step:,}"
            lines.append(("val loss", f"{best} of {self.num_steps:,}"))
        lines += [("", self.ended_early)] if self.ended_early else []
        if self.exact_match is not None and self.majority is not None:
            name = {"val": "validation", "test": "test"}[self.split]
            lines.append((name, self._scored(self.exact_match, self.majority)))
        lines += [("report", self.report)] if self.report else []
        lines += [("adapter", self.adapter), ("try next", self.next_command)]
        return f"\n{self.run}\n\n{rows(lines)}\n"

    def _training(self) -> str:
        resumed = f" since it was resumed at step {self.first_step:,}" if self.first_step else ""
        left_out = f", {self.num_too_long} records left out as too long" if self.num_too_long else ""
        samples = "questions" if self.rewards else "samples"
        return (
            f"{self.num_samples:,} {samples} in {self.num_steps:,} steps; {duration(self.train_seconds)}{resumed}, "
            f"{self.wait_share:.1%} of each step waiting for data{left_out}"
        )

    def _rewarded(self, rewards: Rewards) -> str:
        return (
            f"{rewards.first:.3f} in the first fifth of the steps, {rewards.last:.3f} in the last; "
            f"{rewards.mixed_share:.0%} of {count(rewards.num_questions, 'question')} drawn had answers of different "
            "rewards"
        )

    def _startup(self) -> str:
        """The seconds before the first step, and what took most of them."""
        name, seconds = max(self.startup_seconds.items(), key=lambda item: item[1])
        total = sum(self.startup_seconds.values())
        return f"{duration(total)} before the first step, {duration(seconds)} of them to {name}"

    def _scored(self, exact_match: float, majority: float) -> str:
        """The score by the metric that counts, and exact match if that is another; earlier versions had that alone."""
        interval = Interval(*self.exact_match_interval) if self.exact_match_interval else None
        exact = Headline(EXACT, self.num_questions, exact_match, interval, majority)
        head = self.headline or exact
        beside = "" if head.metric == EXACT else f"; exact match {exact_match:.1%}"
        return f"{head.text()}; majority baseline (the most frequent training answer): {head.majority:.1%}{beside}"


def summarise(opened: OpenRun, evaluation: Evaluation | None) -> Summary:
    run, folder, images, cache = opened.run, opened.folder, opened.images, opened.cache
    trained = folder.read_trained()
    assert isinstance(trained, Trained)  # `lookonce train` refuses a run that was trained elsewhere
    best_step, best_loss = read_curves(folder.log).best or (None, None)
    return Summary(
        run=str(run.output),
        num_files=images.num_files,
        num_distinct=images.num_distinct,
        cache=str(cache.folder),
        cache_bytes=cache.size_bytes,
        num_shards=cache.num_shards,
        encode_seconds=cache.encode_seconds,
        train_seconds=trained.seconds,
        split=run.eval.split,
        num_questions=evaluation.overall.num_questions if evaluation else 0,
        exact_match=evaluation.overall.exact_match if evaluation else None,
        majority=evaluation.overall.majority if evaluation else None,
        adapter=str(folder.adapter),
        next_command=_next_command(opened, evaluation),
        best_validation_loss=best_loss,
        best_validation_step=best_step,
        exact_match_interval=[*evaluation.exact.interval] if evaluation and evaluation.exact.interval else None,
        headline=evaluation.headline if evaluation else None,
        rewards=read_rewards(folder.log),
        **{name: getattr(trained, name) for name in OF_TRAINING},
    )


def _next_command(opened: OpenRun, evaluation: Evaluation | None) -> str:
    with_images = [prediction for prediction in evaluation.predictions if prediction.images] if evaluation else []
    if not with_images:
        split = next(split for split in ("test", "val", "train") if opened.records[split])
        return shell(program(), "eval", opened.run.output, "--split", split)
    learned = [prediction for prediction in with_images if prediction.is_right and not prediction.is_majority_right]
    example = (learned or with_images)[-1]
    images = (word for image in example.images for word in ("--image", shorten(image)))
    return shell(program(), "predict", opened.run.output, *images, "--question", example.question)
