"""Answers as rows: lines of JSONL with the keys of a predictions file, or a table in CSV.

Design: what only an evaluation has is left out: majority answers, and without a reference also the reference and
whether the answer is right.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lookonce.datasets.records import Turn
from lookonce.datasets.text_files import as_cell, safe_cell
from lookonce.errors import UsageError
from lookonce.eval.answers.questions import Asked, Turns, row_of
from lookonce.eval.decoding.answer import Answer
from lookonce.files import write_text

Row = dict[str, Any]
COLUMNS = ("origin", "images", "question", "turn", "predicted", "answer", "right", "logprob", "num_tokens", "ended")
"""The columns of a CSV file."""


def answered(asked: Asked, earlier: tuple[Turn, ...], turns: Turns, image_keys: Sequence[str], answer: Answer) -> Row:
    """The row of an answer; `earlier` are the turns before it in its prompt, answered as `turns` says."""
    prediction = replace(
        row_of(*asked, image_keys),
        earlier=earlier,
        earlier_answers=turns if earlier else None,
        predicted=answer.text,
        logprob=answer.logprob,
        num_tokens=answer.num_tokens,
        ended=answer.ended,
    )
    absent = {"majority"} if prediction.answer else {"majority", "answer", "right"}
    return {name: value for name, value in prediction.to_json().items() if name not in absent}


def check_output(path: Path, records: Path | None, *, overwrite: bool) -> None:
    """Check that rows can be written to a file of that name; `records` has the questions.

    Raises:
        UsageError: it exists, is the records file, or has another suffix.
    """
    if path.suffix.lower() not in (".jsonl", ".csv"):
        raise UsageError(f"{path}: the suffix decides the type of file to write; name one with .jsonl or .csv")
    if records and path.exists() and records.exists() and path.samefile(records):
        raise UsageError(f"{path} is also the file to read; name another file to write")
    if path.exists() and not overwrite:
        raise UsageError(f"{path} exists; name another file, or replace it with --overwrite")


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a file, of the type that its suffix names."""
    if path.suffix.lower() == ".csv":
        write_text(path, _table(rows))
    else:
        write_text(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def _table(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    table = csv.writer(text)  # with another end of lines it would not quote a cell with "\r"
    table.writerow(COLUMNS)
    for row in rows:
        cells = row | {"images": _images(row)}
        table.writerow([safe_cell(as_cell(cells.get(name), name)) for name in COLUMNS])
    return text.getvalue()


def _images(row: Row) -> str:
    """The images of a row in one cell: a path, or several as JSON."""
    images = row["images"]
    return images[0] if len(images) == 1 else json.dumps(images, ensure_ascii=False) if images else ""
