"""Cleaning: how each rule changes text, that every row is counted, and that original texts are kept."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from lookonce.datasets.prepare.definition import find_definition
from lookonce.datasets.prepare.rows import Row, Rule, clean, join_duplicates, text_of

KVASIR = find_definition("kvasir-vqa").rules
RULE: TypeAdapter[Any] = TypeAdapter(Rule)


def rule(**values: Any) -> Any:
    return RULE.validate_python({"name": "it", **values})


def row(question: str = "Is there text?", answer: str = "yes", key: str = "a", **values: Any) -> Row:
    return Row(question, answer, key, **values)


WORDS: dict[str, Any] = {"rule": "replace_words", "words": {"instrumnets": "instruments", "rigth": "right"}}
LABELS: dict[str, Any] = {"rule": "replace_labels", "labels": {">20": ">20mm"}}
CHANGES: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "only whole words are replaced": [
        (WORDS, "How many instrumnets are in the image?", "How many instruments are in the image?"),
        (WORDS, "center; lower-rigth; upper-rigth", "center; lower-right; upper-right"),
        (WORDS, "rigth", "right"),
        *((WORDS, text, text) for text in ("rigthly", "outrigth", "")),
    ],
    "only whole labels are replaced": [
        (LABELS, ">20", ">20mm"),
        (LABELS, "11-20mm;>20", "11-20mm;>20mm"),
        (LABELS, "11-20mm; >20 ; <5mm", "11-20mm; >20mm ; <5mm"),
        *((LABELS, text, text) for text in (">20mm", ">200", "a >20")),
    ],
    "labels are separated by semicolon and space": [
        ({"rule": "separate_labels"}, text, after)
        for text, after in [("5-10mm;<5mm", "5-10mm; <5mm"), ("a ;b", "a; b"), ("a;  b;c", "a; b; c")]
        + [(text, text) for text in ("a; b", "one", " one ")]
    ],
    "labels are in the given order, then alphabetical, and none is lost": [
        ({"rule": "order_labels", "order": order}, text, after)
        for text, order, after in [
            *(("red; pink", [], "pink; red"), ("red;pink", [], "pink; red"), ("a; c; b", ["c"], "c; a; b")),
            *(("b; a; b", [], "a; b; b"), ("a; x; b", ["b", "a"], "b; a; x"), ("none", ["x"], "none")),
        ]
    ],
    "outer spaces are removed and inner ones are single": [({"rule": "strip_spaces"}, "  a \t b\n", "a b")],
}


@pytest.mark.parametrize("cases", CHANGES.values(), ids=CHANGES)
def test_each_rule_changes_texts_as_its_name_says(cases):
    assert [str(rule(**values).change(text)) for values, text, _ in cases] == [after for _, _, after in cases]


def test_rows_without_question_or_answer_are_left_out_but_not_the_answer_none():
    dropped = [row("none", "nan"), row(" None ", "x"), row("Is there text?", "nan"), row("Is there text?", "")]
    stay = [row("Where is the instrument?", "none"), row("nonet", "nano")]
    kept, tallies = clean([*dropped, *stay], KVASIR)
    assert (kept, tallies[0].dropped) == (stay, 4)


def test_rows_are_kept_by_their_metadata():
    english = rule(rule="keep_rows", metadata="language", values=["en"])
    rows = [row(metadata={"language": language}) for language in ("en", "zh")] + [row()]
    kept, tallies = clean(rows, [english])
    assert kept == rows[:1] and tallies[0].dropped == 2


def test_rules_are_applied_in_their_order_and_the_text_as_read_is_kept():
    [after], tallies = clean([row("How many instrumnets are in the image?", "lower-rigth;center;>20")], KVASIR)
    assert after.question == "How many instruments are in the image?"
    assert after.answer == ">20mm; center; lower-right"
    assert after.as_read == ("How many instrumnets are in the image?", "lower-rigth;center;>20")
    assert [tally.changed for tally in tallies] == [0, 1, 1, 1, 1, 1, 0]
    assert tallies[1].examples == [["How many instrumnets are in the image?", after.question]]


def test_rows_that_are_empty_after_all_rules_are_left_out_and_counted():
    kept, tallies = clean([row(answer="x"), row(question=" ")], [rule(rule="replace_labels", labels={"x": ""})])
    assert kept == [] and (tallies[-1].name, tallies[-1].dropped) == ("empty question or answer", 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), ("a", "a"), (2, "2"), (2.0, "2"), (2.5, "2.5"), (float("nan"), "nan"), (True, "True")],
)
def test_values_of_columns_become_texts(value, text):
    assert text_of(value) == text


# Several rows of one question.

POLYPS = [row("type?", answer) for answer in ("ip", "is", "ip")] + [row("type?", "ip", "b"), row("size?", "small")]


@pytest.mark.parametrize(
    ("policy", "answers"),
    [
        ("merge", [("ip", "is"), ("ip",), ("small",)]),
        ("keep", [("ip",), ("is",), ("ip",), ("small",)]),
        ("drop", [("ip",), ("small",)]),
    ],
)
def test_differing_answers_are_merged_kept_or_dropped_and_identical_ones_are_one(policy, answers):
    records, found = join_duplicates(POLYPS, policy)
    assert [tuple(one.answer for one in of_record) for of_record in records] == answers
    assert (found["num_pairs"], found["num_differing_pairs"], found["num_identical"]) == (1, 1, 1)
