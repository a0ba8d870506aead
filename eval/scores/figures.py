"""All figures beside the headline: for each metric what the model and the majority answers score on the same questions.

Design: a metric is a mean over the questions to which it applies, which the references alone decide: closed questions
have the reference yes or no, label questions have several labels in a reference to the same question text, points and
boxes are references of nothing but two or four numbers. So every model is scored on the same questions. A figure whose
highest value is not 1 on these references, such as METEOR, has it beside it. docs/metrics.md describes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from statistics import fmean, median
from typing import Any

from lookonce.eval.scores import match, points, texts
from lookonce.eval.scores.groups import Score, macro
from lookonce.eval.scores.prediction import Prediction

Answers = Callable[[Prediction], str]
"""Which answers are scored."""
MODEL, MAJORITY, PERFECT = attrgetter("predicted"), attrgetter("majority"), attrgetter("answer")
Matched = Callable[[str, Sequence[str]], float]
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
    found = {
        **_macro_figures(groups),
        **_match_figures(predictions),
        **_point_figures(predictions, sizes),
        **_text_figures(predictions),
    }
    return {name: figure for name, figure in found.items() if figure.num_questions}


def _macro_figures(groups: Mapping[str, Mapping[str, Score]]) -> dict[str, Figure]:
    """Exact match as a mean over the groups of each grouping."""
    means = {name: macro(scores.values()) for name, scores in groups.items() if scores}
    return {
        f"macro_{name}": Figure(f"mean over {PLURALS[name]}", mean.num_questions, mean.exact_match, mean.majority)
        for name, mean in means.items()
    }


def _match_figures(predictions: Sequence[Prediction]) -> dict[str, Figure]:
    """Matches of whole answers, labels and words."""
    closed = [prediction for prediction in predictions if match.is_closed(prediction.answer)]
    opened = [prediction for prediction in predictions if not match.is_closed(prediction.answer)]
    labelled = _with_labels(predictions)
    words, labels = cache(match.word_overlap), cache(match.label_overlap)
    return {
        "exact_match_lower": _mean("exact match in lower case", predictions, match.exact_lower),
        "closed_exact_match": _mean("closed questions", closed, match.exact),
        "closed_balanced_accuracy": _of_both("closed questions, balanced", closed, lambda a: _balanced(closed, a)),
        "open_exact_match": _mean("open questions", opened, match.exact),
        "open_token_recall": _mean("open questions, recall of words", opened, lambda *pair: words(*pair).recall),
        "token_recall": _mean("recall of words", predictions, lambda *pair: words(*pair).recall),
        "token_f1": _mean("F1 of words", predictions, lambda *pair: words(*pair).f1),
        "label_precision": _mean("precision of labels", labelled, lambda *pair: labels(*pair).precision),
        "label_recall": _mean("recall of labels", labelled, lambda *pair: labels(*pair).recall),
        "label_f1": _mean("F1 of labels", labelled, lambda *pair: labels(*pair).f1),
        "label_set_match": _mean("labels in any order", labelled, match.same_labels),
        "lenient": _mean(match.LENIENT, predictions, match.lenient),
    }


def _point_figures(predictions: Sequence[Prediction], sizes: Sizes) -> dict[str, Figure]:
    """Points inside boxes, and distances between points."""
    boxed = [prediction for prediction in predictions if points.reference_boxes(_right(prediction))]
    pointed = [prediction for prediction in predictions if points.reference_points(_right(prediction))]
    measured = [prediction for prediction in pointed if _diagonal(prediction, sizes)]
    if any(_is_outside(prediction, sizes) for prediction in measured):
        measured = []  # the records have other units than pixels

    def distances(name: str, average: Callable[[list[float]], float]) -> Figure:
        return _of_both(name, pointed, lambda answers: _over(average, _distances(pointed, answers)), is_share=False)

    return {
        "point_inside": _mean("points inside the box", boxed, points.is_inside),
        "point_distance": distances("distance of points, mean", fmean),
        "point_distance_median": distances("distance of points, median", median),
        "point_distance_diagonal": _of_both(
            "distance in parts of the diagonal",
            measured,
            lambda answers: _over(fmean, _parts(measured, answers, sizes)),
        ),
        "point_unread": _mean("answers without a point", [*boxed, *pointed], _is_unread),
    }


def _text_figures(predictions: Sequence[Prediction]) -> dict[str, Figure]:
    """BLEU, ROUGE, METEOR and chrF; none if the extra is not installed."""
    if not predictions or not texts.is_installed():
        return {}
    metrics = texts.TextMetrics([_right(prediction) for prediction in predictions])
    model, majority, perfect = (
        metrics.scores([answers(prediction) for prediction in predictions]) for answers in (MODEL, MAJORITY, PERFECT)
    )
    return {
        key: Figure(name, len(predictions), model[key], majority[key], perfect[key])
        for key, name in metrics.names.items()
    }


def _mean(name: str, predictions: Sequence[Prediction], matched: Matched) -> Figure:
    """The mean of a match; equal answers to equal references are matched once."""
    matched = cache(matched)
    return _of_both(name, predictions, lambda answers: fmean(matched(answers(one), _right(one)) for one in predictions))


def _of_both(
    name: str, predictions: Sequence[Prediction], of: Callable[[Answers], float | None], is_share: bool = True
) -> Figure:
    """A figure of the model's and of the majority answers."""
    model, majority = (of(MODEL), of(MAJORITY)) if predictions else (None, None)
    return Figure(name, len(predictions), model, majority, is_share=is_share)


def _right(prediction: Prediction) -> tuple[str, ...]:
    """All right answers, the reference first."""
    return tuple(dict.fromkeys((prediction.answer, *prediction.references)))


def _with_labels(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The predictions of questions to which some reference has several labels."""
    questions = {one.question for one in predictions if any(len(match.labels(text)) > 1 for text in _right(one))}
    return [prediction for prediction in predictions if prediction.question in questions]


def _balanced(closed: Iterable[Prediction], answers: Answers) -> float:
    """The mean of the shares of right answers where yes is right and where no is."""
    by_truth: dict[str, list[bool]] = {}
    for one in closed:
        by_truth.setdefault(one.answer.strip().lower(), []).append(match.exact(answers(one), _right(one)))
    return fmean(fmean(rights) for rights in by_truth.values())


def _is_unread(given: str, references: Sequence[str]) -> bool:
    return points.answer_point(given) is None


def _distances(predictions: Iterable[Prediction], answers: Answers) -> list[float]:
    """The distances of the answers that are points."""
    found = [points.distance(answers(one), _right(one)) for one in predictions]
    return [distance for distance in found if distance is not None]


def _parts(predictions: Iterable[Prediction], answers: Answers, sizes: Sizes) -> list[float]:
    """The distances of the answers that are points, in parts of the image's diagonal."""
    found = [(points.distance(answers(one), _right(one)), _diagonal(one, sizes)) for one in predictions]
    return [distance / diagonal for distance, diagonal in found if distance is not None]


def _diagonal(prediction: Prediction, sizes: Sizes) -> float:
    """The diagonal of a question's only image in pixels; 0 if it is not known."""
    size = sizes.get(prediction.image_keys[0]) if len(prediction.image_keys) == 1 else None
    return math.hypot(*size) if size else 0.0


def _is_outside(prediction: Prediction, sizes: Sizes) -> bool:
    """Whether a reference point is not in the question's only image."""
    width, height = sizes[prediction.image_keys[0]] or (0, 0)
    return any(not (0 <= x <= width and 0 <= y <= height) for x, y in points.reference_points(_right(prediction)))


def _over(average: Callable[[list[float]], float], values: list[float]) -> float | None:
    """The average of some values; None if there are none."""
    return average(values) if values else None
