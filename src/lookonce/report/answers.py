"""The single answers of a report: right and wrong ones with their images, the most frequent mistakes, and answers that
a training by rewards drew.

The answers that are shown are drawn from a fixed seed, so none is chosen by hand. The kinds take turns until the sheet
is full; within a kind, images that are not shown yet come first. 48 thumbnails take less than 3 MB, even of noise.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lookonce.datasets.audit.audit import data_url, small_jpegs
from lookonce.datasets.images import is_gone
from lookonce.eval.join import Run, in_one_order
from lookonce.eval.scores.match import is_closed
from lookonce.eval.scores.prediction import Prediction
from lookonce.report.runs import ReportedRun
from lookonce.run.log_file import DrawnQuestion, read_drawn
from lookonce.text import shown

NUM_SHOWN = 48
SEED = "report 0"
SIDE = 240
"""The longer side of a thumbnail, in pixels."""
Answered = tuple[Prediction, ...]
"""The answers of all runs to one question."""


def answers(runs: Sequence[ReportedRun]) -> list[dict[str, Any]] | None:
    """The answers that are shown, by kind; of several seeds those of the first."""
    first_seeds: dict[str, Run] = {}  # the runs of a study have the name of their variant
    for run in runs:
        if run.answers:
            first_seeds.setdefault(run.answers.name, replace(run.answers, name=run.name))
    answered = list(first_seeds.values())
    if not answered:
        return None
    names = [run.name for run in answered]
    return [
        {"kind": title, "num_questions": num_questions, "shown": [_answers(row, names) for row in rows]}
        for title, (num_questions, rows) in draw_sheet(answered).items()
    ]


def _answers(row: Answered, names: Sequence[str]) -> dict[str, Any]:
    keys = ("origin", "images", "question", "answer", "references", "category", "stage", "source")
    values = {key: getattr(row[0], key) for key in keys}
    return values | {"predicted": {name: prediction.predicted for name, prediction in zip(names, row, strict=True)}}


def draw_sheet(runs: Sequence[Run]) -> dict[str, tuple[int, list[Answered]]]:
    """Draw `NUM_SHOWN` questions, each kind in turn: by title, how many questions the kind has, and those drawn.

    The runs answered the same questions.
    """
    kinds = _kinds(runs)
    random_order = random.Random(SEED)
    spread = {title: _spread(random_order.sample(rows, len(rows))) for title, rows in kinds.items()}
    in_turn = [(title, rows[turn]) for turn in range(NUM_SHOWN) for title, rows in spread.items() if turn < len(rows)]
    drawn = in_turn[:NUM_SHOWN]
    return {title: (len(rows), [row for kind, row in drawn if kind == title]) for title, rows in kinds.items()}


def _kinds(runs: Sequence[Run]) -> dict[str, list[Answered]]:
    """All questions of each kind, by its title. Runs are compared with the first one."""
    rows = list(zip(*in_one_order(runs), strict=True))
    everywhere = " in all runs" if len(runs) > 1 else ""
    kinds = {
        f"Wrong{everywhere}": [row for row in rows if not any(prediction.is_right for prediction in row)],
        f"Right{everywhere}": [row for row in rows if all(prediction.is_right for prediction in row)],
    }
    for place, run in enumerate(runs[1:], start=1):
        won = f"Won by {run.name}: right there, wrong in {runs[0].name}"
        kinds[won] = [row for row in rows if row[place].is_right and not row[0].is_right]
        lost = f"Lost by {run.name}: wrong there, right in {runs[0].name}"
        kinds[lost] = [row for row in rows if row[0].is_right and not row[place].is_right]
    return kinds


def _spread(rows: Sequence[Answered]) -> list[Answered]:
    """The rows, the first one about each image before the others."""
    times: Counter[tuple[str, ...]] = Counter()
    rank = []
    for row in rows:
        rank.append(times[row[0].sources])
        times[row[0].sources] += 1
    return [row for _, row in sorted(zip(rank, rows, strict=True), key=lambda pair: pair[0])]


def pictures(kinds: Sequence[Mapping[str, Any]]) -> Callable[[Sequence[str]], tuple[str, str]]:
    """Gives the URL of a question's first image and its description, or an empty URL and why there is no picture."""
    jpegs = small_jpegs({Path(row["images"][0]) for kind in kinds for row in kind["shown"] if row["images"]}, SIDE)

    def picture(images: Sequence[str]) -> tuple[str, str]:
        if not images:
            return "", "no image"
        path = Path(images[0])
        if jpeg := jpegs[path]:
            more = f", the first of {len(images)} images" if len(images) > 1 else ""
            return data_url(jpeg), f"{shown(path.name)}{more}"
        return "", "image not found" if is_gone(path) else "image cannot be read"

    return picture


NUM_DRAWN, NUM_TEXTS = 8, 5
"""The questions of a training by rewards that are shown, and the different answers of each."""


def drawn(runs: Sequence[ReportedRun]) -> list[dict[str, Any]] | None:
    """Some questions of each training by rewards, with the answers that were drawn first and last."""
    lines = {run.name: read_drawn(run.folder.drawn) for run in runs if run.folder}
    return [
        {"run": name, "shown": [_drawn_question(asked) for asked in questions_over_time(of_run)]}
        for name, of_run in lines.items()
        if of_run
    ] or None


def questions_over_time(lines: Sequence[DrawnQuestion]) -> list[list[DrawnQuestion]]:
    """The questions to which answers were drawn at several steps, furthest apart first, each with its first and last
    line; then others, as many of the first steps as of the last."""
    by_question: dict[tuple[str, str], list[DrawnQuestion]] = {}
    for line in sorted(lines, key=lambda line: line.step):
        by_question.setdefault((line.origin, line.question), []).append(line)
    several = [[asked[0], asked[-1]] for asked in by_question.values() if asked[0].step < asked[-1].step]
    several.sort(key=lambda asked: asked[0].step - asked[-1].step)
    once = [asked[:1] for asked in by_question.values() if asked[0].step == asked[-1].step]
    num_other = max(NUM_DRAWN - len(several), 0)
    first, last = once[: -(-num_other // 2)], once[len(once) - num_other // 2 :]
    return [*several[:NUM_DRAWN], *(once if len(once) <= num_other else [*first, *last])]


def _drawn_question(asked: Sequence[DrawnQuestion]) -> dict[str, Any]:
    values = {key: getattr(asked[0], key) for key in ("origin", "images", "question", "references")}
    return values | {"steps": [{"step": line.step, **_drawn_answers(line)} for line in asked]}


def _drawn_answers(line: DrawnQuestion) -> dict[str, Any]:
    """The most frequent answers of a line with their rewards, and how many others there are."""
    times = Counter((answer.text, answer.reward, answer.cut) for answer in line.answers).most_common()
    texts = [
        {"text": text, "reward": reward, "cut": cut, "times": number}
        for (text, reward, cut), number in times[:NUM_TEXTS]
    ]
    return {"answers": texts, "num_other": sum(number for _, number in times[NUM_TEXTS:])}


NUM_QUESTIONS, NUM_PAIRS = 25, 3
"""The questions with most wrong answers, and the confusions of each that are shown."""


def errors(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    answered = [run for run in runs if run.answers]
    if not answered:
        return None
    most_frequent, num_others = confusions(answered)
    closed = [line for run in answered for line in closed_answers(run)]
    return {"confusions": most_frequent, "num_other_questions": num_others, "closed": closed}


def confusions(runs: Sequence[ReportedRun]) -> tuple[list[dict[str, Any]], int]:
    """The most frequent wrong answers, those of the question with most of them first; and how many questions follow.

    `times` says how often each run gives the answer.
    """
    by_run = {run.name: _wrong(run) for run in runs}
    total = sum(by_run.values(), Counter())
    of_question: Counter[str] = Counter()
    for (question, _, _), times in total.items():
        of_question[question] += times
    ranked: dict[str, list[tuple[str, str, str]]] = {text: [] for text, _ in of_question.most_common(NUM_QUESTIONS)}
    for key, _ in total.most_common():
        if key[0] in ranked:
            ranked[key[0]].append(key)
    rows = [
        dict(zip(("question", "answer", "predicted"), key, strict=True))
        | {"times": {name: wrong[key] for name, wrong in by_run.items()}}
        for keys in ranked.values()
        for key in keys[:NUM_PAIRS]
    ]
    return rows, len(of_question) - len(ranked)


def _wrong(run: ReportedRun) -> Counter[tuple[str, str, str]]:
    """How often each wrong answer is given: question, truth, answer."""
    wrong = [row.in_nfc for row in run.answers.predictions if not row.is_right] if run.answers else []
    return Counter((row.question, row.answer, row.predicted.strip()) for row in wrong)


def closed_answers(run: ReportedRun) -> list[dict[str, Any]]:
    """How a run answers the closed questions, by their reference answer."""
    counts: dict[str, Counter[str]] = {}
    for row in run.answers.predictions if run.answers else []:
        if is_closed(row.answer):
            counts.setdefault(row.answer.strip().lower(), Counter())[row.predicted.strip().lower()] += 1
    return [
        {"run": run.name, "answer": truth, "yes": times["yes"], "no": times["no"]}
        | {"other": times.total() - times["yes"] - times["no"]}
        for truth, times in sorted(counts.items(), reverse=True)
    ]
