"""One self-contained HTML page: heading, tiles, notices, tables, histograms, an image gallery, and the style sheet.

Design: it knows nothing of what it reports. The functions take plain texts, numbers and drawings, so no other module
makes a page's HTML. `Section` is a section as plain data, for modules that are also used without a page. Colours are
light or dark as the reader's system asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from lookonce.plots import Content, binned, columns, node
from lookonce.text import shown

STYLE = """
:root {
  --paper: #fbfbf9; --card: #ffffff; --ink: #1d232b; --soft: #5d6873; --line: #e2e5e8;
  --bar: #3b7a9e; --dot: #3b7a9e99;
  --error: #b3362c; --warning: #9a6200; --note: #3b6f8f;
  --line1: #2c6a91; --line2: #b4541a; --line3: #2f7a4d; --line4: #86479a; --line5: #6b6410; --line6: #a8325a;
  --shade1: #a6cde0; --shade2: #f2cf9d; --shade3: #bddaaf; --shade4: #d8c1e2; --shade5: #efbab2; --rest: #e3e6ea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --card: #1b2026; --ink: #e6eaee; --soft: #98a3ae; --line: #2d343c;
    --bar: #6fb0d4; --dot: #6fb0d488;
    --error: #ff8b7e; --warning: #f0b65a; --note: #86bfe0;
    --line1: #6fb0d4; --line2: #f0a35a; --line3: #7cc796; --line4: #cf9be0; --line5: #cdc66a; --line6: #f58bb0;
    --shade1: #2c5b73; --shade2: #765421; --shade3: #446539; --shade4: #644673; --shade5: #7b3f39; --rest: #363d46;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: break-word;
}
main { max-width: 66rem; margin: 0 auto; padding: 3.5rem 1.5rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; margin: 0 0 0.6rem; }
h2 { font-size: 1.25rem; line-height: 1.3; font-weight: 620; margin: 3.5rem 0 0.3rem; }
h3 { font-size: 1rem; line-height: 1.4; font-weight: 620; margin: 1.8rem 0 0.2rem; }
p { margin: 0 0 1rem; max-width: 46rem; }
.lead { font-size: 1.125rem; }
.soft, .lead + p { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.75rem; margin: 2rem 0 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 0.9rem 1.1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.25; font-weight: 620; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 0.875rem; }
.notice {
  background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--tone); border-radius: 8px;
  margin: 0.6rem 0; padding: 0.75rem 1.1rem;
}
.notice p { margin: 0; max-width: none; }
.notice b {
  color: var(--tone); text-transform: uppercase; font-size: 0.72rem; letter-spacing: 0.06em; margin-right: 0.6rem;
}
code { font-size: 0.9em; }
.error { --tone: var(--error); } .warning { --tone: var(--warning); } .note { --tone: var(--note); }
details { margin-top: 0.35rem; font-size: 0.875rem; color: var(--soft); }
summary { cursor: pointer; }
details ul { margin: 0.4rem 0 0.2rem; padding-left: 1.2rem; }
details li { margin: 0.2rem 0; }
.scroll { overflow-x: auto; margin: 0.8rem 0 0; }
table { border-collapse: collapse; min-width: min(26rem, 100%); font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.42rem 0.8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
tbody th { color: var(--ink); font-weight: 400; white-space: normal; min-width: 9rem; }
tbody th, .words { overflow-wrap: anywhere; } .words { display: inline-block; min-width: 7.5rem; }
th:last-child, td:last-child { padding-right: 0; }
figure { margin: 1rem 0 0; }
figure > svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--soft); }
svg text.name, svg text.inside { fill: var(--ink); } svg text.name { font-size: 13px; }
svg text.value { fill: var(--ink); }
.grid { stroke: var(--line); stroke-width: 1; }
polyline { fill: none; stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke; }
.faint { stroke: var(--tone, var(--bar)); stroke-width: 1; stroke-opacity: 0.3; }
.main { stroke: var(--tone, var(--bar)); stroke-width: 2.2; }
.marked { stroke: var(--tone, var(--line2)); stroke-width: 1.8; }
circle.marked { fill: var(--tone, var(--line2)); stroke: var(--paper); stroke-width: 1; }
circle.ring { fill: none; stroke: var(--line2); stroke-width: 1.8; }
.plain { stroke: var(--soft); stroke-width: 1.5; }
.line1 { --tone: var(--line1); } .line2 { --tone: var(--line2); } .line3 { --tone: var(--line3); }
.line4 { --tone: var(--line4); } .line5 { --tone: var(--line5); } .line6 { --tone: var(--line6); }
.swatch { width: 24px; height: 12px; margin-right: 0.4rem; }
.key { margin-right: 1.2rem; white-space: nowrap; font-size: 0.9rem; }
.share { display: inline-grid; justify-items: end; }
.share small { color: var(--soft); font-size: 0.78rem; white-space: nowrap; }
.cell { width: 132px; height: 18px; }
.range { stroke: var(--bar); stroke-width: 3; stroke-linecap: round; stroke-opacity: 0.55; }
.mark { stroke: var(--line2); stroke-width: 2; }
circle.value { fill: var(--bar); }
.sentences { padding-left: 1.2rem; margin: 1rem 0; max-width: 46rem; } .sentences li { margin: 0.3rem 0; }
.bar { fill: var(--bar); } .dot { fill: var(--dot); stroke: var(--bar); }
.shade1 { fill: var(--shade1); } .shade2 { fill: var(--shade2); } .shade3 { fill: var(--shade3); }
.shade4 { fill: var(--shade4); } .shade5 { fill: var(--shade5); } .rest { fill: var(--rest); }
.gallery {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 1.25rem 1rem; margin-top: 1rem;
}
.gallery figure { margin: 0; font-size: 0.85rem; line-height: 1.4; }
.gallery img {
  display: block; width: 100%; aspect-ratio: 4 / 3; object-fit: contain; background: #000; border-radius: 8px;
}
.gallery figcaption { padding-top: 0.45rem; color: var(--soft); }
.absent {
  display: grid; place-items: center; aspect-ratio: 4 / 3; border: 1px dashed var(--soft); border-radius: 8px;
  color: var(--soft); text-align: center; padding: 0.5rem;
}
.gallery dl { display: grid; grid-template-columns: auto 1fr; gap: 0.1rem 0.6rem; margin: 0.2rem 0; }
.gallery dt, .gallery dd { margin: 0; min-width: 0; overflow-wrap: anywhere; } .gallery dd { color: var(--ink); }
.gallery b { display: block; color: var(--ink); font-weight: 600; }
.gallery small { display: block; }
footer { margin-top: 4rem; color: var(--soft); font-size: 0.85rem; }
@media (max-width: 40rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h2 { margin-top: 2.5rem; }
  .curves svg text { font-size: 26px; }
  .gallery { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); }
}
@media print {
  html, body { background: none; font-size: 11px; }
  th, td { padding: 0.3rem 0.5rem; } th { white-space: normal; }
  main { max-width: none; padding: 0; }
  h1, h2, h3 { break-after: avoid; }
  figure, .notice, .tile, tr { break-inside: avoid; }
  .scroll { overflow: visible; } .cell { width: 66px; }
  details::details-content { content-visibility: visible; height: auto; }
  .gallery { grid-template-columns: repeat(4, minmax(0, 1fr)); }
}
"""


def table(header: Sequence[str], lines: Iterable[Sequence[Content]]) -> Element:
    """Make a table in a box of its own, which scrolls: the first column is aligned left, the others right."""
    head = node("thead", node("tr", *(node("th", cell, scope="col") for cell in header)))
    rows = (
        [node("td", cell) if place else node("th", cell, scope="row") for place, cell in enumerate(line)]
        for line in lines  # the first cell is the heading of its line
    )
    body = node("tbody", *(node("tr", *row) for row in rows))
    box = {"tabindex": "0", "role": "group", "aria_label": f"table: {', '.join(header)}"}  # keys scroll what has focus
    return node("div", node("table", head, body), class_="scroll", **box)


def document(title: str, style: str, *content: Content) -> str:
    """Return a whole page as text; its content security policy forbids all network access."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    guard = node("meta", content=policy)
    guard.set("http-equiv", "Content-Security-Policy")
    head = node(
        "head",
        node("meta", charset="utf-8"),
        guard,
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("meta", name="color-scheme", content="light dark"),
        node("title", title),
        node("style", style),
    )
    page = node("html", head, node("body", *content), lang="en")
    return f"<!doctype html>\n{ElementTree.tostring(page, encoding='unicode', method='html')}\n"


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
    return node("div", *map(_card, cards), class_="gallery")


def _card(card: Card) -> Element:
    picture = node("img", src=card.url, alt=card.name) if card.url else node("div", card.name, class_="absent")
    bold = [node("b", card.bold)] if card.bold else []
    named = [part for name, text in card.lines for part in (node("dt", name), node("dd", text))]
    lines = [node("dl", *named)] if named else []
    return node("figure", picture, node("figcaption", card.text, *bold, *lines, node("small", card.small)))
