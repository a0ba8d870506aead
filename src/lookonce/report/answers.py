"""The parts of a report on single answers: right and wrong ones with their images, and the most frequent mistakes.

Design: the answers that are shown are drawn from a fixed seed, so that a page that is made again has the same images,
and none is chosen by hand. The kinds take turns until the sheet is full; within a kind, images that are not shown yet
come first. Thumbnails are of a size with which 48 of them take less than 3 MB, also if the images are noise. Texts are
cut, and characters that cannot be printed are shown as escapes, so that none changes the direction of the page.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from lookonce.datasets.audit.report import data_url, small_jpegs
from lookonce.datasets.images import is_gone
from lookonce.eval.join import Run, in_one_order
from lookonce.eval.scores.match import is_closed
from lookonce.eval.scores.prediction import Prediction
from lookonce.page import Card, gallery, subsection, table
from lookonce.plots import Content
from lookonce.report.runs import Part, ReportedRun, breakable, words
from lookonce.text import count, shown

NUM_SHOWN = 48
SEED = "report 0"
Row = tuple[Prediction, ...]
"""The answers of all runs to one question."""


@dataclass(frozen=True)
class Kind:
    """Questions that are shown together, such as those that one run answers wrong."""

    title: str
    num_questions: int
    rows: list[Row]
    """Those that are shown."""


def draw_sheet(runs: Sequence[Run]) -> list[Kind]:
    """Draw `NUM_SHOWN` questions, each kind in turn; the runs answered the same questions."""
    kinds = _kinds(runs)
    random_order = random.Random(SEED)
    waiting = {title: _spread(random_order.sample(rows, len(rows))) for title, rows in kinds.items()}
    shown: dict[str, list[Row]] = {title: [] for title in kinds}
    while waiting and sum(map(len, shown.values())) < NUM_SHOWN:
        for title in list(waiting)[: NUM_SHOWN - sum(map(len, shown.values()))]:
            if waiting[title]:
                shown[title].append(waiting[title].pop(0))
            else:
                del waiting[title]
    return [Kind(title, len(kinds[title]), rows) for title, rows in shown.items()]


def _kinds(runs: Sequence[Run]) -> dict[str, list[Row]]:
    """All questions of each kind, by its title. Runs are compared with the first one."""
    rows = list(zip(*in_one_order(runs), strict=True))
    everywhere = " in all runs" if len(runs) > 1 else ""
    kinds = {
        f"Wrong{everywhere}": [row for row in rows if not any(one.is_right for one in row)],
        f"Right{everywhere}": [row for row in rows if all(one.is_right for one in row)],
    }
    for place, run in enumerate(runs[1:], start=1):
        won = f"Won by {run.name}: right there, wrong in {runs[0].name}"
        kinds[won] = [row for row in rows if row[place].is_right and not row[0].is_right]
        lost = f"Lost by {run.name}: wrong there, right in {runs[0].name}"
        kinds[lost] = [row for row in rows if row[0].is_right and not row[place].is_right]
    return kinds


def _spread(rows: Sequence[Row]) -> list[Row]:
    """The rows, the first one about each image before the others."""
    times: Counter[tuple[str, ...]] = Counter()
    rank = []
    for row in rows:
        rank.append(times[row[0].sources])
        times[row[0].sources] += 1
    return [row for _, row in sorted(zip(rank, rows, strict=True), key=lambda pair: pair[0])]


ANSWERS = "Answers"
SIDE = 240
"""The longer side of a thumbnail, in pixels."""


def answers(runs: Sequence[ReportedRun]) -> Part:
    """A gallery for each kind of answers."""
    answered = [run.answers for run in runs if run.answers]
    if not answered:
        return Part("answers", ANSWERS, "No questions are answered yet.")
    kinds = draw_sheet(answered)
    names = [run.name for run in answered]
    pictures = small_jpegs({Path(row[0].images[0]) for kind in kinds for row in kind.rows if row[0].images}, SIDE)
    text = "Drawn from a fixed seed, not by hand."
    content = []
    for kind in kinds:
        if kind.rows:
            shown_of_all = f"{count(len(kind.rows), 'question')} of {kind.num_questions:,}."
            content += subsection(kind.title, shown_of_all, gallery(_card(row, names, pictures) for row in kind.rows))
    return Part("answers", ANSWERS, text, [_kind_numbers(kind, names) for kind in kinds], content)


def _card(row: Row, names: Sequence[str], pictures: dict[Path, bytes]) -> Card:
    asked = row[0]
    url, picture = _picture(asked.images, pictures)
    truth = " or ".join(dict.fromkeys((asked.answer, *asked.references)))
    given = [(name, one.predicted) for name, one in zip(names, row, strict=True)]
    lines = [(shown(name), words(text)) for name, text in (("truth", truth), *given)]
    labels = [Path(asked.images[0]).name if asked.images else "", asked.category, asked.stage, asked.source]
    return Card(url, picture, words(asked.question), "", shown(", ".join(filter(None, labels))), lines)


def _picture(images: Sequence[str], pictures: dict[Path, bytes]) -> tuple[str, str]:
    """The URL of a question's first image and its description, or an empty URL and why there is no picture."""
    if not images:
        return "", "no image"
    path = Path(images[0])
    if jpeg := pictures[path]:
        more = f", the first of {len(images)} images" if len(images) > 1 else ""
        return data_url(jpeg), f"{shown(path.name)}{more}"
    return "", "image not found" if is_gone(path) else "image cannot be read"


def _kind_numbers(kind: Kind, names: Sequence[str]) -> dict[str, Any]:
    rows = [
        {
            "origin": row[0].origin,
            "images": row[0].images,
            "question": row[0].question,
            "answer": row[0].answer,
            "references": row[0].references,
            "predicted": {name: one.predicted for name, one in zip(names, row, strict=True)},
        }
        for row in kind.rows
    ]
    return {"kind": kind.title, "num_questions": kind.num_questions, "shown": rows}


ERRORS = "Errors"
NUM_QUESTIONS, NUM_PAIRS = 25, 3
"""The questions with most wrong answers, and the confusions of each that are shown."""


@dataclass(frozen=True)
class Confusion:
    """A wrong answer to a question with this reference answer."""

    question: str
    answer: str
    predicted: str
    times: dict[str, int]
    """How often each run gives it, by name."""


@dataclass(frozen=True)
class Closed:
    """How a run answers the closed questions with one reference answer."""

    run: str
    answer: str
    yes: int
    no: int
    other: int


def errors(runs: Sequence[ReportedRun]) -> Part:
    """Two tables; the confusions have a column for each run."""
    answered = [run for run in runs if run.answers]
    if not answered:
        return Part("errors", ERRORS, "No questions are answered yet.")
    found, num_others = confusions(answered)
    closed = [line for run in answered for line in closed_answers(run)]
    content = [*_wrong_answers(found, num_others, [run.name for run in answered]), *_closed_questions(closed)]
    numbers = {
        "confusions": [asdict(one) for one in found],
        "num_other_questions": num_others,
        "closed": [asdict(one) for one in closed],
    }
    return Part("errors", ERRORS, "" if found else "No wrong answers.", numbers, content)


def _wrong_answers(found: Sequence[Confusion], num_others: int, names: Sequence[str]) -> list[Element]:
    if not found:
        return []
    more = f" {count(num_others, 'other question')} with wrong answers." if num_others else ""
    text = f"The {NUM_PAIRS} most frequent confusions of the questions with most wrong answers.{more}"
    lines = [_confusion_line(one, names) for one in found]
    return subsection("Wrong answers", text, table(("question", "truth", "answer", *names), lines))


def _confusion_line(one: Confusion, names: Sequence[str]) -> list[Content]:
    answers = [breakable(words(text)) for text in (one.answer, one.predicted)]
    return [words(one.question), *answers, *(f"{one.times[name]:,}" for name in names)]


def _closed_questions(closed: Sequence[Closed]) -> list[Element]:
    if not closed:
        return []
    header = ("run", "truth", "answered yes", "answered no", "another answer")
    lines = [(one.run, one.answer, f"{one.yes:,}", f"{one.no:,}", f"{one.other:,}") for one in closed]
    return subsection("Closed questions", "", table(header, lines))


def confusions(runs: Sequence[ReportedRun]) -> tuple[list[Confusion], int]:
    """The most frequent wrong answers, those of the question with most of them first; and how many questions follow."""
    by_run = {run.name: _wrong(run) for run in runs}
    total = sum(by_run.values(), Counter())
    of_question: Counter[str] = Counter()
    for (question, _, _), times in total.items():
        of_question[question] += times
    ranked: dict[str, list[tuple[str, str, str]]] = {
        question: [] for question, _ in of_question.most_common(NUM_QUESTIONS)
    }
    for key, _ in total.most_common():
        if key[0] in ranked:
            ranked[key[0]].append(key)
    found = [
        Confusion(*key, {name: wrong[key] for name, wrong in by_run.items()})
        for keys in ranked.values()
        for key in keys[:NUM_PAIRS]
    ]
    return found, len(of_question) - len(ranked)


def _wrong(run: ReportedRun) -> Counter[tuple[str, str, str]]:
    """How often each wrong answer is given: question, truth, answer."""
    wrong = [one.in_nfc for one in run.answers.predictions if not one.is_right] if run.answers else []
    return Counter((one.question, one.answer, one.predicted.strip()) for one in wrong)


def closed_answers(run: ReportedRun) -> list[Closed]:
    """A line for each reference answer of closed questions."""
    given: dict[str, Counter[str]] = {}
    for one in run.answers.predictions if run.answers else []:
        if is_closed(one.answer):
            given.setdefault(one.answer.strip().lower(), Counter())[one.predicted.strip().lower()] += 1
    return [
        Closed(run.name, truth, times["yes"], times["no"], times.total() - times["yes"] - times["no"])
        for truth, times in sorted(given.items(), reverse=True)
    ]
