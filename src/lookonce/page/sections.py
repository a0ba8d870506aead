"""A page and its sections: heading, tiles, notices, tables, histograms and an image gallery.

The functions take plain texts, numbers and drawings, so no module outside this package makes HTML. `Section` is a
section as plain data, for modules that are also used without a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree.ElementTree import Element

from lookonce.page.markup import Content, document, node, table
from lookonce.page.plots import binned, columns
from lookonce.page.style import STYLE
from lookonce.text import shown

MAX_COLUMNS = 40
"""A histogram has at most this many columns."""

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The header and the lines of a table."""


@dataclass(frozen=True)
class Section:
    """A section as plain data: some tables, and a histogram of how often each number occurs."""

    title: str
    text: str
    tables: Sequence[Table] = ()
    counts: Mapping[int, int] | None = None
    x_name: str = ""
    y_name: str = ""

    def elements(self) -> list[Element]:
        """Return the section as elements of a page: the histogram first, then the tables."""
        plots = [histogram(self.counts, self.x_name, self.y_name)] if self.counts else []
        return section(self.title, self.text, *plots, *(table(header, lines) for header, lines in self.tables))


@dataclass(frozen=True)
class Card:
    """An image of a gallery; below it a line of text, a line in bold, named lines and a small line."""

    url: str
    """A data: URL; empty if there is no picture, and `name` is shown in its place."""
    name: str
    text: str
    bold: str
    small: str
    lines: Sequence[tuple[str, str]] = ()


def page(title: str, content: Iterable[Element], footer: str) -> str:
    """Return a whole page as text."""
    return document(title, STYLE, node("main", *content, node("footer", footer)))


def heading(title: str, lead: str, tiles: Iterable[tuple[str, str]]) -> Element:
    """Make the top of a page: its title, a leading sentence, and tiles with a name and a number each."""
    boxes = (node("div", node("b", number), node("span", name), class_="tile") for name, number in tiles)
    return node("header", node("h1", shown(title)), node("p", lead, class_="lead"), node("div", *boxes, class_="tiles"))


def section(title: str, text: str, *content: Element) -> list[Element]:
    """Make a section: its title, a text that may be empty, and its content."""
    return [node("h2", title), *([node("p", text, class_="soft")] if text else []), *content]


def subsection(title: str, text: str, *content: Element) -> list[Element]:
    """Make a part of a section: its title, a text that may be empty, and its content."""
    return [node("h3", title), *([node("p", text, class_="soft")] if text else []), *content]


def sentences(lines: Iterable[str]) -> Element:
    """Make a list of sentences."""
    return node("ul", *(node("li", line) for line in lines), class_="sentences")


def folded(title: str, content: Element) -> Element:
    """Make a part that is shown when its title is clicked, and in print."""
    return node("details", node("summary", title), content)


def key(names: Sequence[str], kind: str) -> Element:
    """Name the colours of the lines of a plot, from the first on."""
    return node("p", *(part for number, name in enumerate(names, start=1) for part in _named(name, number, kind)))


def _named(name: str, number: int, kind: str) -> list[Content]:
    swatch = node("line", x1=0, x2=24, y1=6, y2=6, class_=f"{kind} line{number}")
    drawing = node("svg", swatch, width=24, height=12, class_="swatch", aria_hidden="true")
    return [node("span", drawing, name, class_="key"), " "]


def notice(level: Literal["error", "warning", "note"], text: str, examples: Sequence[str], num_more: int) -> Element:
    """Make a box with a sentence, some examples, and how many more there are."""
    content: list[Element] = [node("p", node("b", level), *_sentence(text))]
    if examples:
        lines = [node("li", example) for example in examples]
        lines += [node("li", f"and {num_more:,} more")] if num_more > 0 else []
        content.append(node("details", node("summary", "where"), node("ul", *lines), open=""))
    return node("div", *content, class_=f"notice {level}")


def _sentence(text: str) -> list[Content]:
    """Start with a capital, end with a full stop, and set what is between backticks as code."""
    pieces = f"{text[:1].upper()}{text[1:]}.".split("`")
    return [node("code", piece) if index % 2 else piece for index, piece in enumerate(pieces)]


def figure(drawing: Element) -> Element:
    """Give a plot the width of the page."""
    return node("figure", drawing)


def histogram(counts: Mapping[int, int], x_name: str, y_name: str) -> Element:
    """Draw how often each number occurs, in at most `MAX_COLUMNS` ranges."""
    return figure(columns(binned(counts, MAX_COLUMNS), x_name, y_name))


def gallery(cards: Iterable[Card]) -> Element:
    """Show images side by side, each with its text."""
    return node("div", *(node("figure", _picture(card), _caption(card)) for card in cards), class_="gallery")


def _picture(card: Card) -> Element:
    if not card.url:
        return node("div", card.name, class_="absent")
    return node("img", src=card.url, alt=card.name)


def _caption(card: Card) -> Element:
    bold = [node("b", card.bold)] if card.bold else []
    named = [part for name, text in card.lines for part in (node("dt", name), node("dd", text))]
    lines = [node("dl", *named)] if named else []
    return node("figcaption", card.text, *bold, *lines, node("small", card.small))
