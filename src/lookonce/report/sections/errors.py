"""What the runs get wrong: the most frequent wrong answers of each question, and the answers to closed questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from xml.etree.ElementTree import Element

from lookonce.eval.scores.match import is_closed
from lookonce.page import subsection, table
from lookonce.plots import Content
from lookonce.report.part import Part, breakable, words
from lookonce.report.runs import ReportedRun
from lookonce.text import count

TITLE = "Errors"
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
        return Part("errors", TITLE, "No questions are answered yet.")
    found, num_others = confusions(answered)
    closed = [line for run in answered for line in closed_answers(run)]
    content = [*_wrong_answers(found, num_others, [run.name for run in answered]), *_closed_questions(closed)]
    numbers = {
        "confusions": [asdict(one) for one in found],
        "num_other_questions": num_others,
        "closed": [asdict(one) for one in closed],
    }
    return Part("errors", TITLE, "" if found else "No wrong answers.", numbers, content)


def _wrong_answers(found: Sequence[Confusion], num_others: int, names: Sequence[str]) -> list[Element]:
    if not found:
        return []
    more = f" {count(num_others, 'other question')} with wrong answers." if num_others else ""
    text = f"The {NUM_PAIRS} most frequent confusions of the questions with most wrong answers.{more}"
    lines = [_line(one, names) for one in found]
    return subsection("Wrong answers", text, table(("question", "truth", "answer", *names), lines))


def _line(one: Confusion, names: Sequence[str]) -> list[Content]:
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
