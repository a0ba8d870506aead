"""Answer many questions about any images: rows in a file or on the screen, and a summary.

Each batch of answers is written as soon as it is there, beside the output file as those of an evaluation are, and the
same command resumes from them with the same bits. The output file appears whole, in the order of the questions: JSONL
with the keys of a predictions file, without what only an evaluation has, or a table in CSV. A question that cannot be
answered is named with its reason, and all others are answered.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lookonce.datasets.formats.record import is_utf8
from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.records import Turn
from lookonce.datasets.text_files import write_csv, write_jsonl
from lookonce.environment import shorten
from lookonce.errors import ImageError, LookonceError
from lookonce.eval.answerer import Answerer, Results
from lookonce.eval.answers.files import PartialAnswers
from lookonce.eval.answers.questions import Question, Turns, dialogue_numbers, on_this_machine, row_of, turns_before
from lookonce.eval.decoding.dialogue import Answer
from lookonce.files import atomic_write
from lookonce.text import Notify, count, duration, listed, quiet, table

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".csv")
"""Those of the files that are written."""
COLUMNS = ("origin", "images", "question", "turn", "predicted", "answer", "right", "logprob", "num_tokens", "ended")


def answered(
    question: Question, earlier: tuple[Turn, ...], turns: Turns, image_keys: Sequence[str], answer: Answer
) -> Row:
    """The row of an answer; `earlier` are the turns before it in its prompt, answered as `turns` says."""
    row = row_of(*question, image_keys, answer)
    prediction = replace(row, earlier=earlier, earlier_answers=turns if earlier else None)
    absent = {"majority"} if prediction.answer else {"majority", "answer", "right"}
    return {name: value for name, value in prediction.to_json().items() if name not in absent}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    with atomic_write(path) as temporary:
        if path.suffix.lower() == ".csv":
            write_csv(temporary, ((row["origin"], _cells(row)) for row in rows))
        else:
            write_jsonl(temporary, ((row["origin"], row) for row in rows))


def _cells(row: Row) -> Row:
    """The values of a row by their columns; a single image is its path alone."""
    images = row["images"]
    return {name: row.get(name) for name in COLUMNS} | {"images": images[0] if len(images) == 1 else images or None}


MAX_NAMED = 5
"""Reasons of skipped questions that the summary names."""


@dataclass(frozen=True)
class PredictReport:
    rows: list[Row]
    skipped: dict[str, list[str]]
    """Why questions were not answered: the reason, and where each was read."""
    num_images: int
    """Distinct images that could be read."""
    seconds: float
    num_now: int
    """Questions that were answered in these seconds; the others were answered before an interruption."""
    output: Path | None = None

    @property
    def num_skipped(self) -> int:
        return sum(map(len, self.skipped.values()))

    def to_json(self) -> dict[str, Any]:
        """The summary, with the rows unless they are in a file."""
        summary = {
            "num_answered": len(self.rows),
            "num_skipped": self.num_skipped,
            "num_images": self.num_images,
            "seconds": round(self.seconds, 3),
            "questions_per_second": round(self.num_now / self.seconds, 2),
            "skipped": [{"reason": reason, "questions": locations} for reason, locations in self.skipped.items()],
        }
        return summary | ({"output": str(self.output)} if self.output else {"predictions": self.rows})

    def text(self) -> str:
        """The answers as a table, unless they are in a file."""
        if self.output:
            return f"wrote {count(len(self.rows), 'answer')} to {self.output}" if self.rows else "no answers to write"
        cells = [(listed([*map(shorten, row["images"])]), row["question"], row["predicted"]) for row in self.rows]
        return table(("image", "question", "answer"), cells)

    def notes(self) -> Iterator[str]:
        """What was done, and what was left out."""
        speed = f"{duration(self.seconds)}, {self.num_now / self.seconds:,.1f} questions/s"
        yield f"{count(len(self.rows), 'question')} about {count(self.num_images, 'image')} answered in {speed}"
        for reason, locations in list(self.skipped.items())[:MAX_NAMED]:
            yield f"skipped {count(len(locations), 'question')} (the first is {locations[0]}): {reason}"
        if len(self.skipped) > MAX_NAMED:
            yield f"and {count(len(self.skipped) - MAX_NAMED, 'other reason')}; --json has all"


def predict(
    answerer: Answerer,
    questions: Sequence[Question],
    broken: Mapping[str, LookonceError] | None = None,
    output: Path | None = None,
    notify: Notify = quiet,
) -> PredictReport:
    """Answer questions; with `output` the rows are written there. `broken` are records that could not be read.

    Raises:
        LookonceError: no question can be answered, because of the model or the cache.
    """
    began = time.perf_counter()
    questions = answerer.with_system(questions)
    images = index_images((record for record, _ in questions), needs_one=False)
    unfinished = _unfinished(answerer, questions, images, output) if output else None
    before = {number: answer for number, [answer] in unfinished.read().items()} if unfinished else {}
    if before:
        notify(f"continuing: {len(before):,} of {count(len(questions), 'question')} were answered before")
    unwritable: Results = {
        number: ImageError("the path of its image is not UTF-8, and cannot be written; rename it")
        for number, (record, _) in enumerate(questions)
        if output and not all(is_utf8(str(path)) for path in record.images)
    }
    results: Results = {**before, **unwritable}
    bar = partial(tqdm, desc="answer questions", unit="question", leave=False, disable=None)
    with unfinished or contextlib.nullcontext(), bar(total=len(questions), initial=len(before)) as progress:
        for round_results in answerer.results(questions, images, {*results}, notify):
            for number, result in round_results.items():
                if unfinished and isinstance(result, Answer):
                    unfinished.add(number, [result])
            progress.update(len(round_results.keys() - before.keys()))
            results |= round_results | unwritable
    rows = _rows(answerer, questions, images, results)
    if output and rows:
        write_rows(output, rows)
    if unfinished:
        unfinished.remove()
    skipped = _by_reason(questions, results, broken or {})
    seconds = time.perf_counter() - began
    return PredictReport(rows, skipped, images.num_distinct, seconds, len(rows) - len(before), output)


def _unfinished(answerer: Answerer, questions: Sequence[Question], images: ImageIndex, output: Path) -> PartialAnswers:
    """The answers to these questions that an interrupted command has left beside the output file."""
    digest = hashlib.sha256(answerer.identity().encode())
    for record, turn in questions:
        keys = [images.key_of.get(path) for path in record.images]
        digest.update(repr((keys, record.system, record.turns[:turn], record.turns[turn].question)).encode())
    return PartialAnswers(output.parent, output.name, on_this_machine(digest.hexdigest()))


def _rows(answerer: Answerer, questions: Sequence[Question], images: ImageIndex, results: Results) -> list[Row]:
    """The rows of the questions that have answers."""
    answers = {number: result for number, result in sorted(results.items()) if isinstance(result, Answer)}
    turns = answerer.opened.run.eval.turns
    dialogues = (numbers for numbers in dialogue_numbers(questions, turns) if answers.keys() >= {*numbers})
    earlier = turns_before(questions, dialogues, answers, answerer.opened.chat_tokenizer.special_token_ids)
    keys = {number: [images.key_of[path] for path in questions[number][0].images] for number in answers}
    return [answered(questions[n], earlier[n], turns, keys[n], answer) for n, answer in answers.items()]


def _by_reason(
    questions: Sequence[Question], results: Results, broken: Mapping[str, LookonceError]
) -> dict[str, list[str]]:
    """The locations of the questions without an answer, by the reason."""
    reasons: dict[str, list[str]] = {}
    for location, error in broken.items():
        reasons.setdefault(str(error), []).append(location)
    for number, result in sorted(results.items()):
        if isinstance(result, LookonceError):
            reasons.setdefault(str(result), []).append(questions[number][0].origin)
    return reasons
