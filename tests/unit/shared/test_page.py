"""Texts in a page: any text is shown as itself."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from lookonce.page import _environment, words

PRINTED = st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")
TEMPLATE = '{% from "parts.html.jinja" import td, picture %}<p>{{ one }}</p>{{ td(one, other) }}{{ picture("", one) }}'


class Shown(HTMLParser):
    """The attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.names += [value for name, value in attrs if name == "data-name"]

    def handle_data(self, data):
        self.text.append(data)


@given(st.text(PRINTED), st.text(PRINTED))
def test_any_text_is_shown_as_itself(one, other):
    page = Shown(_environment().from_string(TEMPLATE).render(one=one, other=other))
    assert "".join(page.text).strip("\n") == f"{one}{other}{one}".strip("\n")
    assert page.names == [one]
    assert "\x1b" not in _environment().from_string("{{ text }}").render(text=f"\x1b{one}")


def test_a_text_without_anything_to_see_is_named_and_a_long_one_is_cut():
    assert words("") == words(" \n\t") == "(empty)"
    assert words(" no\x00") == " no\\x00"
    assert len(words("a" * 5000)) == 240 and words("a" * 240) == "a" * 240
