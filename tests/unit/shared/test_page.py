"""Texts in a page: any text is shown as itself."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from lookonce.page import document
from lookonce.plots import node

PRINTED = st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")


class Page(HTMLParser):
    """The titles and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_data(self, data):
        self.text.append(data)


@given(st.text(PRINTED), st.text(PRINTED))
def test_any_text_is_shown_as_itself(one, other):
    page = Page(document("", "", node("p", one, node("b", other), one, title=other)))
    assert "".join(page.text) == f"\n{one}{other}{one}\n"
    assert page.titles == [other]
