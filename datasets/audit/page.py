"""The audit as one HTML page that needs no network: what is wrong first, then plots, then images.

Everything is in the page: styles, plots as SVG, small images as data: URLs. It has no script. It can be sent by mail
and opened from a disk. 48 images take about a megabyte.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from lookonce.datasets.audit.audit import Audit
from lookonce.datasets.audit.contact_sheet import Thumbnail
from lookonce.datasets.audit.findings import Finding
from lookonce.datasets.audit.report import asked_again, file_lines, size_lines, summary
from lookonce.page import Card, Section, figure, gallery, heading, histogram, notice, page, section, table
from lookonce.plots import points, shares
from lookonce.text import count

NUM_QUESTIONS = 30
"""The page draws the answers of this many questions."""


def to_page(audit: Audit, sections: Sequence[Section] = (), sheet: Sequence[Thumbnail] = ()) -> str:
    """Return the whole page; `sections` are shown before the answers."""
    names = ", ".join(file.name for file in audit.files)
    content = [
        _heading(audit, names),
        *_findings(audit.findings),
        *section("Files", "", table(*file_lines(audit))),
        *_per_image(audit),
        *(element for one in sections for element in one.elements()),
        *_answers(audit),
        *_sizes(audit),
        *_baselines(audit),
        *_contact_sheet(sheet),
    ]
    footer = "Made by lookonce data audit. Its --json has the same numbers and all items of each finding."
    return page(f"Audit of {names}", content, footer)


def _heading(audit: Audit, names: str) -> Element:
    per_image = audit.num_questions / max(audit.num_named_images, 1)
    best = audit.baselines[-1] if audit.baselines else None
    tiles = [
        ("questions", f"{audit.num_questions:,}"),
        ("distinct questions", f"{audit.num_distinct_questions:,}"),
        ("distinct images", f"{audit.num_images:,}"),
        ("questions per image", f"{per_image:.1f}"),
        *([(f"majority baseline, {best.scored_on}", f"{best.exact_match:.1%}")] if best else []),
    ]
    return heading(names, summary(audit), tiles)


def _findings(findings: Sequence[Finding]) -> list[Element]:
    notices = [notice(one.level, one.says, one.examples, one.num_more) for one in findings]
    return section("What is wrong", "" if findings else "No problems found.", *notices)


def _per_image(audit: Audit) -> list[Element]:
    if not audit.questions_per_image:
        return []
    text = "How many images have each number of questions. The more questions per image, the faster lookonce trains."
    plot = histogram(audit.questions_per_image, "questions per image", "images")
    return section("Questions per image", text, plot)


def _answers(audit: Audit) -> list[Element]:
    chosen = asked_again(audit)[:NUM_QUESTIONS]
    more = audit.num_distinct_questions - len(chosen)
    if not chosen:
        return section("Answers per question", f"{count(more, 'question')} asked once each.")
    text = (
        "The five most frequent answers of each question, and how many distinct answers there are. "
        "If a bar is nearly one colour, the question can be answered without the image."
    )
    text += f" The {count(len(chosen), 'question')} asked most; there are {more:,} others." if more else ""
    lines = [(f"{each.question}  ({count(each.num_answers, 'answer')})", each.num_asked, each.top) for each in chosen]
    plot = shares(lines, "the most frequent answers of each question")
    return section("Answers per question", text, figure(plot))


def _sizes(audit: Audit) -> list[Element]:
    if not audit.sizes:
        return []
    text = f"{count(len(audit.sizes), 'size')}; the area of a circle shows how many images have it."
    plot = points(audit.sizes, "width, pixels", "height, pixels")
    return section("Image sizes", text, figure(plot), table(*size_lines(audit)))


def _baselines(audit: Audit) -> list[Element]:
    lines = [
        (each.scored_on, "itself" if each.learned_on == each.scored_on else each.learned_on, f"{each.num_questions:,}")
        + (f"{each.exact_match:.1%}",)
        for each in audit.baselines
    ]
    text = (
        "The score of always giving each question's most frequent answer, without looking at any image. "
        "Only what a model scores above it may come from the images."
    )
    header = ("scored on", "learned on", "questions", "exact match")
    return section("Majority baseline", text, table(header, lines))


def _contact_sheet(sheet: Sequence[Thumbnail]) -> list[Element]:
    if not sheet:
        return []
    cards = [Card(one.url, one.name, one.question, one.answer, f"{one.name}, {one.file}") for one in sheet]
    text = f"{count(len(cards), 'image')} drawn at random, each with one of its questions."
    return section("Contact sheet", text, gallery(cards))
