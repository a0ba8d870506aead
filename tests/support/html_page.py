"""HTML pages that tests look at, and texts from data that look like markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from lookonce.text import duration, size

VOID = {"meta", "img", "link", "br"}
TAGS = {
    *("html", "head", "title", "meta", "style", "body", "main", "header", "footer", "h1", "h2", "p", "div", "span"),
    *("b", "code", "small", "details", "summary", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"),
    *("figure", "figcaption", "img", "h3", "dl", "dt", "dd", "i", "u"),
    *("svg", "g", "defs", "path", "use", "text", "tspan", "clippath", "rect"),
}
HOSTILE = (
    "</style></title><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!-- ' onload='alert(1)",
    "]]>&lt;b&gt;\x00\x1b[31m\ud800 \u2028 javascript:alert(1)",
)


class Page(HTMLParser):
    """The elements of a page; fails if they are not nested properly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def urls(self) -> list[str]:
        return [
            values[name] for _, values in self.found for name in ("src", "href", "data", "action") if name in values
        ]

    def check(self) -> None:
        """The page has known elements only, no event handlers, and nothing outside itself."""
        assert {tag for tag, _ in self.found} <= TAGS
        assert not [name for _, values in self.found for name in values if name.startswith("on")]
        assert all(url.startswith("data:image/jpeg;base64,") for url in self.urls())
        assert all(values["xlink:href"][0] == "#" for _, values in self.found if "xlink:href" in values)
        assert any("default-src 'none'" in values.get("content", "") for _, values in self.found)


def assert_harmless(text: str) -> Page:
    """Check a page that holds hostile texts, and return it."""
    page = Page(text)
    page.check()
    assert not re.search("[\x00\x1b\ud800]", text)
    assert (
        not re.search(r"url\((?!#\w+\))", text)
        and "@import" not in text
        and not re.search(r'(?:src|href)="?https?:', text)
    )
    text.encode("utf-8")
    return page


def as_text(page: str) -> str:
    """The text of a page, on one line."""
    return " ".join("".join(f"{part} " for part in Page(page).text).split())


DRAWINGS = ("<svg.*?</svg>", "<style>.*?</style>", "<footer>.*?</footer>")
FIXED = {"95", "100", "0", "25", "3", "0.7", "1", "2", "8"}
"""Numbers in fixed words: 95 %, a 25th, ROUGE-2."""


def numbers_of(page: str) -> set[str]:
    """The numbers that a page shows as text, without those in fixed words."""
    text = as_text(re.sub("|".join(DRAWINGS), "", page, flags=re.S))
    return set(re.findall(r"[\d.,]*\d", text)) - FIXED


def numbers_in(value: object) -> set[str]:
    """The numbers of a JSON value in all forms in which a page may write them, and those in its texts."""
    if isinstance(value, dict):
        return set().union(*map(numbers_in, value), *map(numbers_in, value.values()), {str(len(value))})
    if isinstance(value, list | tuple):
        return set().union(*map(numbers_in, value), {str(len(value))})
    if isinstance(value, int | float) and not isinstance(value, bool):
        forms = [f"{abs(value):,.{digits}f}" for digits in range(6)] + [f"{abs(100 * value):.1f}", f"{value:.2g}"]
        return set(re.findall(r"[\d.,]*\d", " ".join([*forms, f"{value}", duration(value), size(value)])))
    return set(re.findall(r"[\d.,]*\d", value)) if isinstance(value, str) else set()
