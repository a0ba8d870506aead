"""Texts of records and answers on the page."""

from __future__ import annotations

from lookonce.report.runs import words


def test_a_text_without_anything_to_see_is_named_and_a_long_one_is_cut():
    assert words("") == words(" \n\t") == "(empty)"
    assert words(" no\x00") == " no\\x00"
    assert len(words("a" * 5000)) == 240 and words("a" * 240) == "a" * 240
