"""Right and wrong answers with their images, and what one run has right and another wrong.

Design: thumbnails are of a size with which 48 of them take less than 3 MB, also if the images are noise. Texts are cut,
and characters that cannot be printed are shown as escapes, so that none changes the direction of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from lookonce.datasets.audit.contact_sheet import data_url, small_jpegs
from lookonce.datasets.stamps import is_gone
from lookonce.page import Card, gallery, subsection
from lookonce.report.part import Part, words
from lookonce.report.runs import ReportedRun
from lookonce.report.sheet import Kind, Row, draw_sheet
from lookonce.text import count, shown

TITLE = "Answers"
SIDE = 240
"""The longer side of a thumbnail, in pixels."""


def answers(runs: Sequence[ReportedRun]) -> Part:
    """A gallery for each kind of answers."""
    answered = [run.answers for run in runs if run.answers]
    if not answered:
        return Part("answers", TITLE, "No questions are answered yet.")
    kinds = draw_sheet(answered)
    names = [run.name for run in answered]
    pictures = _pictures(kinds)
    text = "Drawn from a fixed seed, not by hand."
    content = [element for kind in kinds if kind.rows for element in _gallery(kind, names, pictures)]
    return Part("answers", TITLE, text, [_numbers(kind, names) for kind in kinds], content)


def _gallery(kind: Kind, names: Sequence[str], pictures: dict[Path, bytes]) -> list[Element]:
    text = f"{count(len(kind.rows), 'question')} of {kind.num_questions:,}."
    return subsection(kind.title, text, gallery(_card(row, names, pictures) for row in kind.rows))


def _pictures(kinds: Sequence[Kind]) -> dict[Path, bytes]:
    return small_jpegs({Path(row[0].images[0]) for kind in kinds for row in kind.rows if row[0].images}, SIDE)


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


def _numbers(kind: Kind, names: Sequence[str]) -> dict[str, Any]:
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
