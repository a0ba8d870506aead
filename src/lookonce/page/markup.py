"""HTML and SVG as elements of the standard library's tree, which escapes all text and attributes.

Nothing from data can become markup: it is only ever text of an element or a value of an attribute, never a string that
is pasted into a page. What no page may hold, control characters and halves of surrogate pairs, is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

Content = str | Element


def node(tag: str, *content: Content, **attributes: object) -> Element:
    """An element; attributes by name, `class_` for class, `_` for `-`."""
    names = {name.rstrip("_").replace("_", "-"): clean(str(value)) for name, value in attributes.items()}
    element = Element(tag, names)
    for part in content:
        _append(element, part)
    return element


def svg(width: float, height: float, *content: Content, label: str) -> Element:
    """A drawing that is as wide as its place allows; `label` says to those who do not see it what it shows."""
    box = f"0 0 {width:g} {height:g}"
    element = node("svg", *content, role="img", aria_label=label)
    element.set("viewBox", box)
    return element


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> Element:
    """A table: the first column aligned left, the others right."""
    head = node("thead", node("tr", *(node("th", cell, scope="col") for cell in header)))
    body = node("tbody", *(node("tr", *(node("td", cell) for cell in line)) for line in lines))
    return node("div", node("table", head, body), class_="scroll")


def clean(text: str) -> str:
    return NOT_TEXT.sub("\ufffd", text)


def document(title: str, style: str, *content: Content) -> str:
    """A whole page, which asks the network for nothing."""
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


def _append(element: Element, part: Content) -> None:
    if isinstance(part, Element):
        element.append(part)
    elif len(element):
        element[-1].tail = (element[-1].tail or "") + clean(part)
    else:
        element.text = (element.text or "") + clean(part)
