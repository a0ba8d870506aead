"""An audit as one HTML page that asks the network for nothing: what is wrong first, then plots, then images.

Everything is in it: styles, drawings as SVG, small images as data: URLs. There is no script. It can be sent by mail and
opened from a disk. 48 images make about a megabyte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from lookonce.datasets.audit.audit import Audit
from lookonce.datasets.audit.findings import Finding
from lookonce.datasets.audit.report import asked_again, file_lines, grouped, size_lines, summary
from lookonce.datasets.audit.sheet import Thumbnail
from lookonce.page.markup import Content, document, node, table
from lookonce.page.plots import columns, points, shares
from lookonce.page.style import STYLE
from lookonce.text import count, shown

NUM_QUESTIONS = 30
"""Whose answers are drawn."""
NUM_ITEMS = 20
"""Places of a finding that are named."""
NUM_COLUMNS = 40


@dataclass(frozen=True)
class Section:
    """What others add to a page: some tables, and how often numbers occur."""

    title: str
    says: str
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[str]]]] = ()
    numbers: Mapping[int, int] | None = None
    x_name: str = ""
    y_name: str = ""


def to_page(audit: Audit, sections: Sequence[Section] = (), sheet: Sequence[Thumbnail] = ()) -> str:
    """The whole page."""
    names = ", ".join(file.name for file in audit.files)
    parts = [
        _head(audit, names),
        *_findings(audit.findings),
        *_section("Files", "", table(*file_lines(audit))),
        *_per_image(audit),
        *(element for section in sections for element in _extra(section)),
        *_answers(audit),
        *_sizes(audit),
        *_baselines(audit),
        *_sheet(sheet),
        node("footer", "Made by lookonce data audit. The same numbers, and every place, are in its --json."),
    ]
    return document(f"Audit of {names}", STYLE, node("main", *parts))


def _head(audit: Audit, names: str) -> Element:
    per_image = audit.num_questions / max(audit.num_images, 1)
    best = audit.baselines[-1] if audit.baselines else None
    tiles = [
        ("questions", f"{audit.num_questions:,}"),
        ("distinct questions", f"{audit.num_distinct_questions:,}"),
        ("distinct images", f"{audit.num_images:,}"),
        ("questions an image", f"{per_image:.1f}"),
        *([(f"majority baseline, {best.scored_on}", f"{best.exact_match:.1%}")] if best else []),
    ]
    return node(
        "header",
        node("h1", shown(names)),
        node("p", summary(audit), class_="lead"),
        node(
            "div", *(node("div", node("b", n), node("span", name), class_="tile") for name, n in tiles), class_="tiles"
        ),
    )


def _findings(findings: Sequence[Finding]) -> list[Element]:
    if not findings:
        return _section("What is wrong", "Nothing was found.")
    return _section("What is wrong", "", *map(_finding, findings))


def _finding(finding: Finding) -> Element:
    parts: list[Element] = [node("p", node("b", finding.level), *_sentence(finding.says))]
    if finding.examples:
        left = len(finding.items) - len(finding.examples)
        lines = [node("li", example) for example in finding.examples]
        lines += [node("li", f"and {left:,} more")] if left > 0 else []
        parts.append(node("details", node("summary", "where"), node("ul", *lines), open=""))
    return node("div", *parts, class_=f"finding {finding.level}")


def _sentence(says: str) -> list[Content]:
    """As a sentence, what stands in backticks as code."""
    pieces = f"{says[:1].upper()}{says[1:]}.".split("`")
    return [node("code", piece) if number % 2 else piece for number, piece in enumerate(pieces)]


def _per_image(audit: Audit) -> list[Element]:
    if not audit.questions_per_image:
        return []
    says = "How many images have so many questions. The more an image has, the more is saved by looking at it once."
    plot = columns(grouped(audit.questions_per_image, NUM_COLUMNS), "questions an image", "images")
    return _section("Questions per image", says, node("figure", plot))


def _extra(section: Section) -> list[Element]:
    parts = []
    if section.numbers:
        parts.append(node("figure", columns(grouped(section.numbers, NUM_COLUMNS), section.x_name, section.y_name)))
    parts += [table(header, lines) for header, lines in section.tables]
    return _section(section.title, section.says, *parts)


def _answers(audit: Audit) -> list[Element]:
    chosen = asked_again(audit)[:NUM_QUESTIONS]
    more = audit.num_distinct_questions - len(chosen)
    if not chosen:
        return _section("Answers per question", f"{count(more, 'question')} asked once each.")
    says = (
        "The five most frequent answers of each question, and how many different ones there are. "
        "A bar that is nearly one colour is a question that needs no image."
    )
    says += f" The {count(len(chosen), 'question')} asked most; there are {more:,} others." if more else ""
    lines = [(f"{each.question}  ({count(each.num_answers, 'answer')})", each.num_asked, each.top) for each in chosen]
    return _section("Answers per question", says, node("figure", shares(lines)))


def _sizes(audit: Audit) -> list[Element]:
    if not audit.sizes:
        return []
    says = f"{count(len(audit.sizes), 'size')}; the area of a circle says how many images have it."
    plot = points(audit.sizes, "width, pixels", "height, pixels")
    return _section("Image sizes", says, node("figure", plot), table(*size_lines(audit)))


def _baselines(audit: Audit) -> list[Element]:
    lines = [
        (each.scored_on, "itself" if each.learned_on == each.scored_on else each.learned_on, f"{each.num_questions:,}")
        + (f"{each.exact_match:.1%}",)
        for each in audit.baselines
    ]
    says = (
        "Always the most frequent answer of each question, without a look at any image. "
        "What a model scores above it, it may have seen."
    )
    header = ("scored on", "learned on", "questions", "exact match")
    return _section("The baseline that needs no image", says, table(header, lines))


def _sheet(sheet: Sequence[Thumbnail]) -> list[Element]:
    if not sheet:
        return []
    figures = [
        node(
            "figure",
            node("img", src=one.url, alt=one.name, loading="lazy"),
            node("figcaption", one.question, node("b", one.answer), node("small", f"{one.name}, {one.file}")),
        )
        for one in sheet
    ]
    says = f"{count(len(sheet), 'image')} drawn at random, each with one of its questions."
    return _section("Contact sheet", says, node("div", *figures, class_="sheet"))


def _section(title: str, says: str, *content: Element) -> list[Element]:
    return [node("h2", title), *([node("p", says, class_="soft")] if says else []), *content]
