"""The metric that counts (`eval.metric`): what each question scores by it, and what all questions together do.

Q questions.

Intervals, tests and means over seeds need a number for each question. Most metrics are means of such numbers. BLEU and
chrF are figures of all answers together, so their numbers are linearised, as in surveys: the figure itself, plus Q
times what the question's counts add to it by its derivative. Mean and variance between images are then the figure's.

References alone decide to which questions a metric applies, so these are the same for every model. A function of the
user's own is imported like any module, and not from the working directory unless PYTHONPATH names that, since a run
file may come from others. So modules of Python itself are refused, and functions with other parameters, or `os:system`
would be a metric. What it prints goes to stderr, since stdout may be JSON; if it ends the process, it has failed.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookonce.errors import UsageError
from lookonce.eval.scores import match
from lookonce.eval.scores.prediction import Prediction
from lookonce.eval.statistics import Clusters, Interval, share_interval
from lookonce.run.sections import METRICS
from lookonce.text import count, first_line, quoted

Vector = NDArray[np.float64]
EXACT = "exact_match"
Matched = Callable[[str, tuple[str, ...]], float | None]
"""What an answer scores with its references; None if it cannot be measured."""
MATCHED: Mapping[str, Matched] = {
    EXACT: match.exact,
    "exact_match_lower": match.exact_lower,
    "token_f1": lambda *pair: match.word_overlap(*pair).f1,
    "token_recall": lambda *pair: match.word_overlap(*pair).recall,
    "label_f1": lambda *pair: match.label_overlap(*pair).f1,
    "label_set_match": match.same_labels,
    "point_inside": match.is_inside,
}
"""The metrics of single answers that need no other library, by their keys."""
OF_ALL = ("bleu", "chrf")
"""The metrics that are figures of all answers together."""
PARAMETERS = ("question", "answer", "reference", "record")
OF_RECORD = ("origin", "images", "image_keys", "turn", "references", "source", "category", "stage")
"""What a function of the user's own gets of the record."""
FORM = f"def NAME({', '.join(PARAMETERS)}) -> float"


def name_of(metric: str) -> str:
    """A metric as texts name it."""
    return METRICS.get(metric, metric)


def right_answers(prediction: Prediction) -> tuple[str, ...]:
    """All right answers, the reference first."""
    return tuple(dict.fromkeys((prediction.answer, *prediction.references)))


def several_labels(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The questions whose text has several labels in some reference."""
    texts = {row.question for row in predictions if any(len(match.labels(text)) > 1 for text in right_answers(row))}
    return [row for row in predictions if row.question in texts]


def with_boxes(predictions: Sequence[Prediction]) -> list[Prediction]:
    return [row for row in predictions if match.reference_boxes(right_answers(row))]


@cache
def own_function(metric: str, kind: str = "metric") -> Callable[[str, str, str, Mapping[str, Any]], float]:
    """The function that `module:function` names; it is a metric, from 0 to 1, or a reward, which may be any number.

    Raises:
        UsageError: it cannot be imported, is a module of Python itself, or has other parameters.
    """
    module, _, name = metric.partition(":")
    values = "from 0 to 1" if kind == "metric" else "any finite number"
    advice = f"name a function of yours, {FORM}, {values}, in a module that is installed or in a folder of PYTHONPATH"
    if module.partition(".")[0] in sys.stdlib_module_names or "__main__" in module:
        raise UsageError(f"the {kind} {metric} is part of Python, or a program; {advice}")
    try:
        with _printing_to_stderr():
            function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise UsageError(f"the {kind} {metric} cannot be imported ({first_line(error)}); {advice}") from None
    if not inspect.isfunction(function) or tuple(inspect.signature(function).parameters) != PARAMETERS:
        raise UsageError(f"the {kind} {metric} has another form; {advice}")
    return function


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Let what the user's own code prints go to stderr within the block, also what its processes and C code print."""

    def flush() -> None:
        for stream in filter(None, (sys.stdout, sys.__stdout__)):
            stream.flush()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)

    flush()
    try:
        stdout = os.dup(1)
    except OSError:  # it is closed
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def check_metric(metric: str) -> None:
    """Check that a metric can be computed here; raises UsageError if a function or a library cannot be imported."""
    if metric not in METRICS:
        own_function(metric)
    elif metric not in MATCHED and not match.has_text_metrics():
        raise UsageError(f"the metric {metric} needs libraries that are {match.NOT_INSTALLED}")


class Scorer:
    """Scores answers to the same questions by one metric."""

    def __init__(self, predictions: Sequence[Prediction], metric: str) -> None:
        """Choose the questions to which the metric applies; raises UsageError if it cannot be computed here."""
        check_metric(metric)
        rows = [row.in_nfc for row in predictions]
        chosen = several_labels(rows) if metric.startswith("label_") else rows
        chosen = with_boxes(rows) if metric == "point_inside" else chosen
        kept = {id(row) for row in chosen}
        self.metric, self.rows = metric, chosen
        self.numbers = np.array([number for number, row in enumerate(rows) if id(row) in kept], dtype=np.intp)
        """The numbers of the questions to which the metric applies."""

    def __call__(self, answers: Sequence[str]) -> Vector:
        """What answers to all questions score, of those to which the metric applies; the figure is the mean.

        Raises:
            UsageError: a function of the user's own failed, or returned no share; names the record.
        """
        texts = [answers[number] for number in self.numbers]
        values: Sequence[float | None]
        if self.metric in MATCHED:
            matched = cache(MATCHED[self.metric])  # equal answers to equal references are scored once
            values = [matched(text, right_answers(row)) for text, row in zip(texts, self.rows, strict=True)]
        elif self.metric in METRICS:
            values = self._texts.each(texts, self.metric) if texts else []
        else:
            values = [own_score(self.metric, text, row) for text, row in zip(texts, self.rows, strict=True)]
        return np.array(values, dtype=np.float64)

    @cached_property
    def _texts(self) -> match.TextMetrics:
        return match.TextMetrics([right_answers(row) for row in self.rows])


def working_scorer(predictions: Sequence[Prediction], metric: str, of: str = "the questions") -> Scorer:
    """The scorer of some questions, tried before answers are there; `of` names the questions.

    Raises:
        UsageError: the metric cannot be computed here, applies to none of them, or is a function of the user's own that
            cannot score the first reference.
    """
    scorer = Scorer(predictions, metric)
    if not scorer.rows:
        raise UsageError(f"eval.metric: {metric} applies to none of {of}; add --set eval.metric=exact_match")
    if metric not in METRICS:
        own_score(metric, scorer.rows[0].answer, scorer.rows[0])
    return scorer


def place_of(row: Prediction, answer: str) -> str:
    """A record, question and answer in a message."""
    return f"{row.origin} (question {quoted(row.question)}, answer {quoted(answer)})"


def own_score(metric: str, answer: str, row: Prediction, metadata: Mapping[str, Any] | None = None) -> float:
    """The best score of an answer to a question with any reference, by a function of the user's own.

    With `metadata` of its record it is a reward, which may be any number.

    Raises:
        UsageError: the function failed, or returned no such number; names the record.
    """
    function, where = own_function(metric), place_of(row, answer)
    best = -math.inf
    for reference in right_answers(row):
        record = {**copy.deepcopy(dict(metadata or {})), **{name: getattr(row, name) for name in OF_RECORD}}
        try:
            with _printing_to_stderr():
                value = float(function(row.question, answer, reference, record))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's own may be of any kind
            problem = f"{type(error).__name__}: {first_line(error)}"
            raise UsageError(f"{metric} failed on {where}: {problem}; correct it, and run the command again") from error
        if not (0 <= value <= 1 if metadata is None else math.isfinite(value)):
            allowed = "a score is from 0 to 1" if metadata is None else "a reward is a finite number"
            raise UsageError(f"{metric} gave {value} for {where}, and {allowed}; correct it")
        best = max(best, value)
    return best


@dataclass(frozen=True)
class Headline:
    """The score by the metric that counts, over the questions to which it applies; 0 if there are none."""

    metric: str
    num_questions: int
    score: float
    interval: Interval | None
    """The 95 % interval of the score; None if there are too few images."""
    majority: float

    @classmethod
    def of(cls, metric: str, score_Q: Vector, majority_Q: Vector, clusters: Clusters) -> Headline:
        if not len(score_Q):
            return cls(metric, 0, 0.0, None, 0.0)
        interval = share_interval(score_Q, clusters)
        return cls(metric, len(score_Q), float(score_Q.mean()), interval, float(majority_Q.mean()))

    @property
    def name(self) -> str:
        return name_of(self.metric)

    def text(self) -> str:
        """The score with its interval: 82.8% [58.2 to 94.3] exact match on 87 questions."""
        if not self.num_questions:
            return f"{self.name} applies to none of the questions"
        interval = f" [{self.interval.in_percent()}]" if self.interval else ""
        return f"{self.score:.1%}{interval} {self.name} on {count(self.num_questions, 'question')}"


def common_metric(metrics: Mapping[str, str]) -> str:
    """The metric of some runs, given by the names of the runs; raises UsageError if they have different ones."""
    if len(different := {*metrics.values()}) > 1:
        named = ", ".join(f"{run}: {metric}" for run, metric in metrics.items())
        raise UsageError(f"the runs were evaluated by different metrics ({named}); choose one with --metric")
    return different.pop() if different else EXACT
