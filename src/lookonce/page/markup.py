"""HTML and SVG as elements of the standard library's ElementTree, which escapes all text and attributes.

Nothing from data can become markup: data is always the text of an element or the value of an attribute, never a string
pasted into a page. Characters that no page may contain, control characters and lone surrogates, are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

NOT_ALLOWED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""The characters that an HTML page may not contain."""

Content = str | Element


def node(tag: str, *content: Content, **attributes: object) -> Element:
    """Make an element. In attribute names, write `class_` for class and `_` for `-`."""
    names = {name.rstrip("_").replace("_", "-"): clean(str(value)) for name, value in attributes.items()}
    element = Element(tag, names)
    for item in content:
        _append(element, item)
    return element


def svg(width: float, height: float, *content: Content, label: str) -> Element:
    """Make a drawing that scales to the width of its parent; screen readers read `label`."""
    box = f"0 0 {width:g} {height:g}"
    element = node("svg", *content, role="img", aria_label=label)
    element.set("viewBox", box)
    return element


def table(header: Sequence[str], lines: Iterable[Sequence[Content]]) -> Element:
    """Make a table in a box of its own, which scrolls: the first column is aligned left, the others right."""
    head = node("thead", node("tr", *(node("th", cell, scope="col") for cell in header)))
    body = node("tbody", *(node("tr", *_cells(line)) for line in lines))
    box = {"tabindex": "0", "role": "group", "aria_label": f"table: {', '.join(header)}"}  # keys scroll what has focus
    return node("div", node("table", head, body), class_="scroll", **box)


def _cells(line: Sequence[Content]) -> list[Element]:
    """The first cell is the heading of its line."""
    return [node("td", cell) if place else node("th", cell, scope="row") for place, cell in enumerate(line)]


def clean(text: str) -> str:
    """Replace the characters that a page may not contain."""
    return NOT_ALLOWED.sub("\ufffd", text)


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


def _append(element: Element, item: Content) -> None:
    if isinstance(item, Element):
        element.append(item)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + clean(item)
    else:
        element.text = (element.text or "") + clean(item)
