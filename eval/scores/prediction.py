"""Predictions, one answered question each: written to JSONL and read from it, grouped, counted and scored one by one.

An answer is right if it equals a reference apart from spaces around it and Unicode's normal form; lenient metrics, for
which "no" matches "none", have spoiled published numbers. A row has all that a score or a judge needs without the
records (docs/predictions.md). A mean over groups (macro) gives each group the same weight. Where exact match is the
metric that counts and hardly tells answers apart, outputs say so.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from lookonce.datasets.formats.record import Record, Turn, is_utf8
from lookonce.datasets.text_files import read_jsonl
from lookonce.errors import RecordsError
from lookonce.eval.scores.match import exact
from lookonce.files import write_text
from lookonce.text import located, nfc, quoted, share

VERSION = 1
"""The version of the rows that are written."""


FORMER = {"own": "predicted", "true": "reference"}
"""What rows of earlier versions call the answers in prompts."""
InPrompt = Annotated[Literal["predicted", "reference"], BeforeValidator(lambda value: FORMER.get(value, value))]


@dataclass(frozen=True)
class Prediction:
    """One question: the reference answer, the model's answer and the majority answer."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    origin: str
    """Where the record was read from, such as val.jsonl:12."""
    images: tuple[str, ...]
    """The paths of the images, in the order of the prompt."""
    question: str
    """The text of the question."""
    answer: str
    """The reference answer."""
    predicted: str
    """The model's answer."""
    majority: str
    """The most frequent training answer of the question: the majority baseline's answer."""
    references: tuple[str, ...] = ()
    """All right answers, if there are several."""
    image_keys: tuple[str, ...] = ()
    """The sha256 of each image file's bytes, by which the questions of two runs are joined; without it, by `images`
    where these are the same in all runs."""
    turn: int = 0
    """The number of the question in its record, from 0."""
    source: str | None = None
    """The record's metadata under `source`, as text."""
    category: str | None = None
    """The record's metadata under `category`, as text."""
    stage: str | None = None
    """The record's metadata under `stage`, as text."""
    system: str | None = None
    """The system text of the prompt."""
    earlier: tuple[Turn, ...] = ()
    """The turns before the question in the prompt, each with `question` and `answer`."""
    earlier_answers: InPrompt | None = None
    """Which answers these turns have: those that the model `predicted`, or the record's `reference` (`eval.turns`)."""
    context: tuple[Turn, ...] = ()
    """The answers to questions of earlier stages in the prompt, each with `question` and `answer` (`data.context`)."""
    context_answers: InPrompt | None = None
    """Which these are: those that the model `predicted`, or the `reference` of the records (`eval.staged`)."""
    logprob: float | None = None
    """The sum of the log-probabilities of the answer's tokens."""
    num_tokens: int | None = None
    """The number of tokens of the answer, with its end token."""
    ended: Literal["stop", "length"] | None = None
    """Why the answer ended: `stop` at its end token, `length` at `eval.max_new_tokens`."""

    @property
    def text(self) -> str:
        """The model's answer, under the name that an `Answer` has for it."""
        return self.predicted

    @property
    def is_right(self) -> bool:
        return self.accepts(self.predicted)

    @property
    def is_majority_right(self) -> bool:
        return self.accepts(self.majority)

    @property
    def sources(self) -> tuple[str, ...]:
        """What the question shares with others, by which they are correlated: its images, or without any its record."""
        return self.image_keys or self.images or (self.origin,)

    def accepts(self, answer: str) -> bool:
        return exact(answer, (self.answer, *self.references))

    @property
    def in_nfc(self) -> Prediction:
        """The prediction with its texts as they are compared; a file has them as they were written."""
        texts: dict[str, Any] = {name: nfc(text) for name in TEXTS if (text := getattr(self, name)) is not None}
        earlier, context = (tuple(turn.in_nfc for turn in turns) for turns in (self.earlier, self.context))
        return replace(self, **texts, references=tuple(map(nfc, self.references)), earlier=earlier, context=context)

    def to_json(self) -> dict[str, Any]:
        """The row in a predictions file; keys without a value are left out, also a log-probability that is NaN."""
        values = asdict(self)
        if self.logprob is not None and not math.isfinite(self.logprob):
            values["logprob"] = None  # JSON has no NaN
        kept = {name: value for name, value in values.items() if name not in OPTIONAL or value not in (None, ())}
        return {"version": VERSION} | kept | {"right": self.is_right}


TEXTS = ("question", "answer", "predicted", "majority", "system", "source", "category", "stage")
"""Keys whose values are single texts to compare."""
OPTIONAL = {field.name for field in fields(Prediction) if field.default in (None, ())} - {"image_keys"}
"""Keys that a row lacks if they have no value."""
ROW = TypeAdapter(Prediction)


def label(value: Any) -> str | None:
    """A value of a record's metadata as text; None if there is none."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_predictions(path: Path, predictions: Sequence[Prediction]) -> None:
    lines = [json.dumps(prediction.to_json(), ensure_ascii=False) for prediction in predictions]
    write_text(path, "".join(f"{line}\n" for line in lines))


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions in a file.

    Raises:
        RecordsError: the file is missing or empty; a line is damaged, has another form, or is there twice; it is named.
    """
    locations: dict[tuple[Any, ...], str] = {}
    predictions = []
    try:
        for location, row in read_jsonl(path, broken=_refuse_damaged):
            prediction = _read_row(row, location)
            key = (prediction.origin, prediction.turn)
            if key in locations:
                raise RecordsError(
                    f"{location} answers {quoted(prediction.question)} of {prediction.origin} a second time, after "
                    f"{locations[key]}; remove the file and write it again with: lookonce eval RUN"
                )
            locations[key] = location
            predictions.append(prediction)
    except FileNotFoundError:
        raise RecordsError(f"no predictions at {located(path)}; write them with: lookonce eval RUN") from None
    if not predictions:
        raise RecordsError(f"{path} has no predictions; write them with: lookonce eval RUN")
    return predictions


def _refuse_damaged(location: str, error: RecordsError) -> NoReturn:
    raise RecordsError(f"{error}; the line is damaged: write the file again with: lookonce eval RUN") from None


def _read_row(row: Any, location: str) -> Prediction:
    version = row.get("version") if isinstance(row, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise RecordsError(
            f"{location} has version {version} of predictions, and this lookonce reads up to {VERSION}; update lookonce"
        )
    try:
        prediction = ROW.validate_python(row)
        problem = "" if version else "it lacks `version`"
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        problem = f"it lacks `{name}`" if first["type"] == "missing" else f"`{name}`: {first['msg']}"
    if not problem and not is_utf8(json.dumps(row, ensure_ascii=False)):
        problem = "it holds half a character (a lone surrogate)"
    if problem:
        raise RecordsError(f"{location} is not a prediction: {problem}; expected rows as `lookonce eval` writes them")
    return prediction


GROUPINGS = ("question", "category", "source", "stage")
"""What predictions are grouped by: fields of `Prediction`."""
MAX_GROUPS = 40
"""The most groups of a grouping that are shown, since question texts may all be different."""


@dataclass(frozen=True)
class Score:
    """Exact match and majority baseline over some questions, as shares."""

    num_questions: int
    exact_match: float
    majority: float


def score(predictions: Sequence[Prediction]) -> Score:
    right = sum(prediction.is_right for prediction in predictions)
    majority_right = sum(prediction.is_majority_right for prediction in predictions)
    return Score(len(predictions), share(right, len(predictions)), share(majority_right, len(predictions)))


def scores_by(predictions: Iterable[Prediction], grouping: str) -> dict[str, Score]:
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        if (name := getattr(prediction, grouping)) is not None:
            groups[name].append(prediction)
    return {name: score(groups[name]) for name in sorted(groups)}


def macro(scores: Iterable[Score]) -> Score:
    """The means over groups, and the number of their questions; there must be a group."""
    scores = list(scores)
    return Score(
        sum(group.num_questions for group in scores),
        fmean(group.exact_match for group in scores),
        fmean(group.majority for group in scores),
    )


TrainingAnswers = Mapping[str, AbstractSet[str]]
"""The answers of the training records to each question."""


@dataclass(frozen=True)
class Counts:
    """The numbers of such answers; None if not known."""

    empty: int
    cut: int | None
    """Answers that ended at `eval.max_new_tokens`."""
    outside_training: int | None
    """Answers that no training record has for the question, or for any question if training lacks this one."""
    distinct_wrong: int
    """Different wrong answers, all questions together."""

    @classmethod
    def of(cls, predictions: Sequence[Prediction], training: TrainingAnswers | None = None) -> Counts:
        """Count them; `training` are the `training_answers` of the run."""
        endings = [row.ended for row in predictions if row.ended]
        outside = None
        if training:
            all_answers: AbstractSet[str] = set().union(*training.values())
            outside = sum(row.predicted.strip() not in training.get(row.question, all_answers) for row in predictions)
        return cls(
            empty=sum(not row.predicted.strip() for row in predictions),
            cut=endings.count("length") if endings else None,
            outside_training=outside,
            distinct_wrong=len({row.predicted.strip() for row in predictions if not row.is_right}),
        )

    def text(self) -> str:
        """One line, without what is not known."""
        named = {
            "different wrong": self.distinct_wrong,
            "empty": self.empty,
            "cut off": self.cut,
            "never seen in training": self.outside_training,
        }
        return ", ".join(f"{number:,} {name}" for name, number in named.items() if number is not None)


def training_answers(records: Iterable[Record]) -> dict[str, set[str]]:
    """The answers to each question in some records, with all references; both in NFC."""
    answers: dict[str, set[str]] = defaultdict(set)
    for record in records:
        for turn in record.turns:
            answers[nfc(turn.question)].update(nfc(text).strip() for text in (turn.answer, *record.references))
    return answers


FEW_RIGHT = 0.05
"""The least share of right answers of some run with which exact match says something."""
SENTENCE = 5
"""The median number of words of the references from which they count as sentences, about which it says little."""


def is_exact_match_poor(rows: Sequence[Sequence[Prediction]]) -> bool:
    """Whether exact match says little about the answers of some runs to the same questions."""
    are_sentences = median(len(prediction.answer.split()) for prediction in rows[0]) >= SENTENCE
    return are_sentences or all(sum(prediction.is_right for prediction in row) < FEW_RIGHT * len(row) for row in rows)
