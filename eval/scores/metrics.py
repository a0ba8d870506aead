"""The evaluation of some predictions: the metric that counts beside its baselines, exact match by group, all figures.

Q questions.

docs/metrics.md defines the figures. Each is over the questions to which it applies, of the model and of the majority
answers. Baselines answer the same questions, so their intervals are of differences in pairs, over images. With shuffled
images a question counts for its own image, because all questions would be connected through the others. A figure whose
highest value is not 1, such as METEOR, has beside it what the references score. The cost is about a second for 9,000
questions of 975 images, without the text metrics.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from operator import attrgetter, mul
from statistics import fmean, median
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from lookonce.datasets.balance import balance_weights
from lookonce.eval.scores import match
from lookonce.eval.scores.metric import (
    EXACT,
    MATCHED,
    Headline,
    Matched,
    Scorer,
    right_answers,
    several_labels,
    with_boxes,
)
from lookonce.eval.scores.prediction import (
    GROUPINGS,
    MAX_GROUPS,
    Counts,
    Prediction,
    Score,
    TrainingAnswers,
    macro,
    score,
    scores_by,
)
from lookonce.eval.statistics import MIN_CLUSTERS, Interval, clusters_of, difference_interval
from lookonce.run.folder import RunFolder, read_form
from lookonce.run.sections import METRICS
from lookonce.text import rows, share, shell, table

Baseline = Literal["untuned", "shuffled", "reference", "none"]
"""The baselines that a model answers."""
BASELINES: tuple[Baseline, ...] = get_args(Baseline)[:2]
"""Those of every run."""
IN_CONTEXT: tuple[Baseline, ...] = get_args(Baseline)[2:]
"""Those of a run with `data.context`: reference answers to earlier questions in the prompts, and none."""
NAMES = {
    "majority": "majority",
    "untuned": "untuned model",
    "shuffled": "shuffled images",
    "reference": "reference answers in context",
    "none": "no context",
}
"""The names of all baselines in tables."""
MAJORITY_NOTE = "majority: always a question's most frequent training answer, without the image"
BaselineAnswers = Mapping[Baseline, Sequence[str]]
"""The answers of baselines, in the order of the questions."""


@dataclass(frozen=True)
class BaselineScore:
    """What a baseline scores on the questions of a run."""

    exact_match: float
    difference: float
    """The score of the run less that of the baseline, by the metric that counts."""
    interval: Interval | None
    """The 95 % interval of the difference; None if there are too few images."""
    score: float
    """What the baseline scores by the metric that counts."""

    def line(self, key: str) -> tuple[str, str, str, str]:
        """The line of a table: baseline, score, how much higher the model is, the interval of that."""
        interval = self.interval.in_percent() if self.interval else "none"
        return NAMES[key], f"{self.score:.1%}", f"{100 * self.difference:+.1f}", interval


def headline(
    predictions: Sequence[Prediction], answers: BaselineAnswers, metric: str = EXACT
) -> tuple[Headline, dict[str, BaselineScore]]:
    """The score of all by a metric; and the majority and the baselines in `answers`, by their keys."""
    scorer = Scorer(predictions, metric)
    clusters = clusters_of([row.sources for row in scorer.rows])
    majority: dict[str, Sequence[str]] = {"majority": [prediction.majority for prediction in predictions]}
    all_answers = majority | dict(answers)
    model_Q = scorer([prediction.predicted for prediction in predictions])
    scores = {key: scorer(texts) for key, texts in all_answers.items()}
    head = Headline.of(metric, model_Q, scores["majority"], clusters)
    baselines: dict[str, BaselineScore] = {}
    for key, texts in all_answers.items() if head.num_questions else ():
        right = sum(row.accepts(text) for row, text in zip(predictions, texts, strict=True))
        score, interval = float(scores[key].mean()), difference_interval(model_Q - scores[key], clusters)
        baselines[key] = BaselineScore(share(right, len(predictions)), head.score - score, interval, score)
    return head, baselines


MODEL, MAJORITY, PERFECT = attrgetter("predicted"), attrgetter("majority"), attrgetter("answer")
"""Which answers are scored."""
Sizes = Mapping[str, tuple[int, int] | None]
"""Width and height of images by their keys."""
PLURALS = {"question": "question texts", "category": "categories", "source": "sources", "stage": "stages"}


@dataclass(frozen=True)
class Figure:
    """What one metric is over some questions; None where it is not defined."""

    name: str
    num_questions: int
    model: float | None
    majority: float | None
    perfect: float | None = None
    """What the references themselves score; None if that is 1 by definition, or 0 for a distance."""
    is_share: bool = True
    """Whether it is a share, and not a distance in the units of the answers."""

    def line(self, baselines: Iterable[float | None] = ()) -> tuple[str, ...]:
        """The figure as a line of a table: name, questions, model, majority, what other baselines score, perfect."""
        shown = (self._shown(value) for value in (self.model, self.majority, *baselines, self.perfect))
        return (self.name, f"{self.num_questions:,}", *shown)

    def _shown(self, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:.1%}" if self.is_share else f"{value:,.1f}"

    def to_json(self) -> dict[str, Any]:
        """Without what is not defined for the metric, and without its form."""
        values = {"name": self.name, "num_questions": self.num_questions}
        scores = {"model": self.model, "majority": self.majority}
        return values | scores | ({} if self.perfect is None else {"perfect": self.perfect})


def figures(
    predictions: Sequence[Prediction], groups: Mapping[str, Mapping[str, Score]], sizes: Sizes
) -> dict[str, Figure]:
    """All figures by their keys; metrics that apply to no question are left out."""
    closed = [row for row in predictions if match.is_closed(row.answer)]
    opened = [row for row in predictions if not match.is_closed(row.answer)]
    labelled, boxed = several_labels(predictions), with_boxes(predictions)
    pointed = [row for row in predictions if match.reference_points(right_answers(row))]
    measured = [row for row in pointed if _diagonal(row, sizes)]
    if any(_is_outside(row, sizes) for row in measured):
        measured = []  # the records have other units than pixels
    answer_weights = balance_weights([(row.question, row.answer) for row in predictions])
    words, labels = cache(match.word_overlap), cache(match.label_overlap)

    def balanced(scored: dict[int, float]) -> float:
        """The mean of the shares of right answers where yes is right and where no is."""
        truths = [row.answer.strip().lower() for row in closed]
        return fmean(fmean(scored[n] for n, answer in enumerate(truths) if answer == truth) for truth in {*truths})

    def counted(key: str, rows: Sequence[Prediction]) -> Figure:
        return _mean(METRICS[key], rows, MATCHED[key])

    all_figures = _macro_figures(groups) | {
        "exact_match_lower": counted("exact_match_lower", predictions),
        "exact_match_balanced": _mean(
            "exact match, answers balanced",
            predictions,
            match.exact,
            of=lambda scored: sum(map(mul, scored.values(), answer_weights)) / len(scored),
        ),
        "closed_exact_match": _mean("closed questions", closed, match.exact),
        "closed_balanced_accuracy": _mean("closed questions, balanced", closed, match.exact, of=balanced),
        "open_exact_match": _mean("open questions", opened, match.exact),
        "open_token_recall": _mean("open questions, recall of words", opened, lambda *pair: words(*pair).recall),
        "token_recall": counted("token_recall", predictions),
        "token_f1": counted("token_f1", predictions),
        "label_precision": _mean("precision of labels", labelled, lambda *pair: labels(*pair).precision),
        "label_recall": _mean("recall of labels", labelled, lambda *pair: labels(*pair).recall),
        "label_f1": counted("label_f1", labelled),
        "label_set_match": counted("label_set_match", labelled),
        "lenient": _mean(match.LENIENT, predictions, match.lenient),
        "point_inside": counted("point_inside", boxed),
        "point_distance": _mean("distance of points, mean", pointed, match.distance, is_share=False),
        "point_distance_median": _mean(
            "distance of points, median",
            pointed,
            match.distance,
            of=lambda scored: median(scored.values()),
            is_share=False,
        ),
        "point_distance_diagonal": _mean(
            "distance in parts of the diagonal",
            measured,
            match.distance,
            of=lambda scored: fmean(value / _diagonal(measured[number], sizes) for number, value in scored.items()),
        ),
        "point_unread": _mean(
            "answers without a point", [*boxed, *pointed], lambda answer, _: match.answer_point(answer) is None
        ),
    }
    all_figures |= _text_figures(predictions)
    return {name: figure for name, figure in all_figures.items() if figure.num_questions}


def _macro_figures(groups: Mapping[str, Mapping[str, Score]]) -> dict[str, Figure]:
    """Exact match as a mean over the groups of each grouping."""
    means = {name: macro(scores.values()) for name, scores in groups.items() if scores}
    return {
        f"macro_{name}": Figure(f"mean over {PLURALS[name]}", mean.num_questions, mean.exact_match, mean.majority)
        for name, mean in means.items()
    }


def _mean(
    name: str,
    predictions: Sequence[Prediction],
    matched: Matched,
    *,
    of: Callable[[dict[int, float]], float] = lambda scored: fmean(scored.values()),
    is_share: bool = True,
) -> Figure:
    """The mean of a match over some questions, or what `of` makes of the scores by the number of the question."""
    matched = cache(matched)  # equal answers to equal references are matched once

    def figure(answers: Callable[[Prediction], str]) -> float | None:
        each = {number: matched(answers(row), right_answers(row)) for number, row in enumerate(predictions)}
        scored = {number: value for number, value in each.items() if value is not None}
        return of(scored) if scored else None

    return Figure(name, len(predictions), figure(MODEL), figure(MAJORITY), is_share=is_share)


def _text_figures(predictions: Sequence[Prediction]) -> dict[str, Figure]:
    """BLEU, ROUGE, METEOR and chrF; none if the extra is not installed."""
    if not predictions or not match.has_text_metrics():
        return {}
    metrics = match.TextMetrics([right_answers(prediction) for prediction in predictions])
    model, majority, perfect = (
        metrics.scores([answers(prediction) for prediction in predictions]) for answers in (MODEL, MAJORITY, PERFECT)
    )
    return {
        key: Figure(name, len(predictions), model[key], majority[key], perfect[key])
        for key, name in metrics.names.items()
    }


def points_inside(predictions: Sequence[Prediction]) -> dict[str, Figure]:
    """Points inside the box by source and category, as ScreenSpot has them by platform and kind of element.

    The last figure is their mean, in which each group has the same weight. Empty for less than two groups.
    """
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for row in predictions:
        if (name := ", ".join(filter(None, (row.source, row.category)))) and match.reference_boxes(right_answers(row)):
            groups[name].append(row)
    if not 1 < len(groups) <= MAX_GROUPS:
        return {}
    by_name = {name: _mean(f"points inside, {name}", groups[name], match.is_inside) for name in sorted(groups)}
    model, majority = (fmean(getattr(figure, of) for figure in by_name.values()) for of in ("model", "majority"))
    number = sum(figure.num_questions for figure in by_name.values())
    return by_name | {"mean": Figure("points inside, mean over these", number, model, majority)}


def _diagonal(prediction: Prediction, sizes: Sizes) -> float:
    """The diagonal of a question's only image in pixels; 0 if it is not known."""
    size = sizes.get(prediction.image_keys[0]) if len(prediction.image_keys) == 1 else None
    return math.hypot(*size) if size else 0.0


def _is_outside(prediction: Prediction, sizes: Sizes) -> bool:
    """Whether a reference point is not in the question's only image."""
    width, height = sizes[prediction.image_keys[0]] or (0, 0)
    return any(not (0 <= x <= width and 0 <= y <= height) for x, y in match.reference_points(right_answers(prediction)))


IN_DETAIL = {
    "exact_match_balanced",
    "exact_match_lower",
    "open_token_recall",
    "token_recall",
    "label_precision",
    "label_recall",
}
"""Figures that are in the file of the metrics and not in the text."""


@dataclass(frozen=True)
class Evaluation:
    """Predictions and their scores: overall, by group, and by all other metrics."""

    predictions: list[Prediction]
    overall: Score
    headline: Headline
    """The score by the metric that counts."""
    exact: Headline
    """Exact match; the same, unless another metric counts."""
    baselines: dict[str, BaselineScore]
    """What the baselines that are known score, by their keys."""
    groups: dict[str, dict[str, Score]]
    """The scores by question text, category, source and stage; empty where no record has one."""
    figures: dict[str, Figure]
    counts: Counts
    text_metrics: str = field(default_factory=match.text_metric_libraries)
    """The libraries of the text metrics, or what to install."""

    @classmethod
    def of(
        cls,
        predictions: list[Prediction],
        training: TrainingAnswers | None = None,
        sizes: Sizes | None = None,
        baselines: BaselineAnswers | None = None,
        metric: str = EXACT,
    ) -> Evaluation:
        """Score predictions, beside the majority and what other `baselines` answered.

        `training` are the answers of the training records, `sizes` those of images by key; `metric` counts.

        Raises:
            UsageError: the metric cannot be computed here.
        """
        compared = [prediction.in_nfc for prediction in predictions]
        groups = {name: scores_by(compared, name) for name in GROUPINGS}
        head, scored = headline(compared, baselines or {}, metric)
        return cls(
            predictions=predictions,
            overall=score(compared),
            headline=head,
            exact=head if metric == EXACT else headline(compared, {})[0],
            baselines=scored,
            groups=groups,
            figures=figures(compared, groups, sizes or {}),
            counts=Counts.of(compared, training),
        )

    def text(self, beside: Mapping[str, Mapping[str, Any]] | None = None) -> str:
        """One line per question text, the overall score last; then the baselines and the other figures.

        `beside` has the evaluations of baselines as JSON, which are shown beside the other figures.
        """
        figures_beside = {key: value.get("metrics", {}) for key, value in (beside or {}).items()}
        other_figures = [
            figure.line([values.get(key, {}).get("model") for values in figures_beside.values()])
            for key, figure in self.figures.items()
            if key not in IN_DETAIL
        ]
        other_figures += [
            figure.line([None] * len(figures_beside)) for figure in points_inside(self.predictions).values()
        ]
        header = ("other metrics", "asked", "model", "majority", *figures_beside, "at most")
        beside_model = ("baseline", self.headline.name, "model is higher by", "95% interval")
        blocks = [
            self._by_question(),
            table(beside_model, [baseline.line(key) for key, baseline in self.baselines.items()])
            if self.baselines
            else "",
            table(header, other_figures) if other_figures else "",
            rows(self._notes()),
        ]
        return "\n\n".join(filter(None, blocks))

    def _by_question(self) -> str:
        """The table of question texts; of many, those that are asked most."""
        every = self.groups["question"]
        most = sorted(every, key=lambda name: -every[name].num_questions)[:MAX_GROUPS]
        shown = {name: question_score for name, question_score in every.items() if name in most}
        scores = [*shown.items(), ("all", self.overall)]
        lines = [[name, f"{s.num_questions:,}", f"{s.exact_match:.1%}", f"{s.majority:.1%}"] for name, s in scores]
        header = ["question", "asked", "exact match", "majority"]
        if self.exact.interval:
            lines[-1][2] += f" [{self.exact.interval.in_percent()}]"
        if more := len(every) - len(shown):
            lines.insert(-1, [f"{more:,} other question texts", *[""] * (len(header) - 1)])
        return f"{table(header, lines)}\n  {MAJORITY_NOTE}"

    def _notes(self) -> list[tuple[str, str]]:
        notes = [("answers", self.counts.text())]
        if self.headline.metric != EXACT:
            notes.insert(0, ("metric", f"{self.headline.text()}; majority {self.headline.majority:.1%}"))
        if self.predictions and self.exact.interval is None:
            notes.append(("interval", f"none, because the questions are about fewer than {MIN_CLUSTERS} images"))
        if self.text_metrics == match.NOT_INSTALLED:
            notes.append(("BLEU etc.", self.text_metrics))
        return notes

    def to_json(self) -> dict[str, Any]:
        inside = points_inside(self.predictions)
        by_group = {
            f"by_{name}": {group: asdict(value) for group, value in scores.items()}
            for name, scores in self.groups.items()
        }
        return {
            "overall": asdict(self.overall),
            "headline": asdict(self.headline),
            "exact_match_interval": self.exact.interval,
            "baselines": {key: asdict(baseline_score) for key, baseline_score in self.baselines.items()},
            **by_group,
            "metrics": {key: figure.to_json() for key, figure in self.figures.items()},
            **({"points_inside": {name: figure.to_json() for name, figure in inside.items()}} if inside else {}),
            "counts": asdict(self.counts),
            "text_metrics": self.text_metrics,
        }


@dataclass(frozen=True)
class WrittenMetrics:
    """The fields of metrics/SPLIT.json that are read again."""

    overall: Score
    headline: Headline | None = None
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    baselines: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


def read_metrics(folder: RunFolder, name: str) -> dict[str, Any]:
    """The JSON of the evaluation of a split or of a baseline, or nothing; raises RunFolderError for a broken file."""
    path = folder.metrics(name)
    if not path.exists():
        return {}
    split, _, baseline = name.partition("-")
    again = shell("lookonce", "eval", folder.folder, "--split", split, *(["--baselines"] if baseline else []))
    advice = f"write it again with: {again}"
    read_form(path, WrittenMetrics, advice)
    value = read_form(path, dict[str, Any], advice)
    if "headline" not in value:  # earlier versions knew exact match alone
        overall, interval = Score(**value["overall"]), value.get("exact_match_interval")
        head = Headline(EXACT, overall.num_questions, overall.exact_match, interval, overall.majority)
        value["headline"] = asdict(head)
    if "baselines" in value:  # earlier versions had another one
        kept = {key: beside for key, beside in value["baselines"].items() if key in NAMES}
        value["baselines"] = {key: {"score": beside["exact_match"]} | beside for key, beside in kept.items()}
    return value


def read_headline(folder: RunFolder, name: str) -> Headline | None:
    """The score of a split or a baseline of it, if there is one; raises RunFolderError for a broken file."""
    values = read_metrics(folder, name)
    return TypeAdapter(Headline).validate_python(values["headline"]) if values else None
