"""Rows: how each rule changes texts, with every row counted; splits by image, always the same, and leaks of others."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from lookonce.datasets.prepare.definition import find_definition
from lookonce.datasets.prepare.rows import (
    Row,
    Rule,
    clean,
    families,
    join_duplicates,
    measure_leaks,
    part_of,
    split_by_image,
    split_by_lists,
    text_of,
)

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


SHARES = {"val": 0.15, "test": 0.15}


def of(key: str, image_id: str = "", **values) -> Row:
    return Row("q", "a", key, image_id=image_id, **values)


def test_6500_images_are_4550_and_975_and_975():
    rows = [of(f"key {number}", f"image {number}") for number in range(6500) for _ in range(1 + number % 3)]
    parts = split_by_image(rows, SHARES, 42)
    assert Counter(parts.values()) == {"train": 4550, "val": 975, "test": 975}


def test_the_draw_is_a_shuffle_of_the_sorted_names_by_the_seed():
    names = [f"image {number:02d}" for number in range(40)]
    parts = split_by_image([of(f"key {name}", name) for name in reversed(names)], SHARES, 7)
    random.Random("split, seed 7").shuffle(names)
    assert {parts[f"key {name}"] for name in names[:6]} == {"val"}
    assert {parts[f"key {name}"] for name in names[6:12]} == {"test"}
    assert {parts[f"key {name}"] for name in names[12:]} == {"train"}


FAMILIES = {
    "same bytes": ([of("x", "a"), of("x", "b"), of("y", "c")], 2),
    "same name": ([of("x", "a"), of("y", "a"), of("z", "b")], 2),
    "a chain": ([of("x", "a"), of("x", "b"), of("y", "b"), of("y", "c")], 1),
    "no names": ([of("x"), of("y")], 2),
    "a name like a key": ([of("a", "b"), of("b", "a")], 2),
}


@pytest.mark.parametrize(("rows", "num_families"), FAMILIES.values(), ids=FAMILIES)
def test_images_that_could_reveal_each_other_are_one_family(rows, num_families):
    found = families(rows)
    assert found.keys() == {one.key for one in rows} and len(set(found.values())) == num_families


def test_rows_with_the_same_value_of_a_together_column_stay_on_one_side():
    rows = [of(f"key {n}", f"image {n}", metadata={"sequence": n // 10}) for n in range(200)]
    parts = split_by_image(rows, SHARES, 42, ["sequence"])
    of_sequence = [{parts[f"key {n}"] for n in range(start, start + 10)} for start in range(0, 200, 10)]
    assert all(len(found) == 1 for found in of_sequence)
    assert Counter(parts.values()) == {"train": 140, "val": 30, "test": 30}


IMAGES = st.lists(
    st.builds(
        of,
        key=st.sampled_from([f"k{n}" for n in range(12)]),
        image_id=st.sampled_from(["", *(f"i{n}" for n in range(12))]),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.guarantee("No image bytes and no image name are on two sides of a split by image.")
@given(rows=IMAGES, seed=st.integers(0, 5), order=st.randoms(use_true_random=False))
def test_no_bytes_and_no_name_are_on_two_sides_for_any_order_of_rows(rows, seed, order):
    parts = split_by_image(rows, SHARES, seed)
    assert parts.keys() == {one.key for one in rows}
    for name in {one.image_id for one in rows} - {""}:
        assert len({parts[one.key] for one in rows if one.image_id == name}) == 1
    leaks = measure_leaks([one.key for one in rows], [parts[one.key] for one in rows], families(rows))
    assert all(leak["also_in_train"] == 0 for leak in leaks.values())
    shuffled = rows[:]
    order.shuffle(shuffled)
    assert split_by_image(shuffled, SHARES, seed) == parts


def test_lists_of_names_decide_and_images_in_no_list_have_no_part():
    lists = {"train": ["a.jpg"], "val": [], "test": ["b", "gone"]}
    assert split_by_lists(["a", "b.png", "c", ""], lists) == {"a": "train", "b.png": "test", "c": "", "": ""}


def test_a_split_by_question_leaks_and_the_leak_is_measured_by_content():
    # a, b in both; c only in test; d is a's bytes under another name
    asked = [("a", "train"), ("b", "train"), ("a", "test"), ("b", "test"), ("b", "test"), ("c", "test")]
    rows = [of(f"key {name}", name) for name, _ in asked] + [of("key a", "d"), of("key e", "e")]
    parts = [part for _, part in asked] + ["val", ""]
    leaks = measure_leaks([one.key for one in rows], parts, families(rows))
    assert [leaks["val"][key] for key in ("images", "also_in_train", "share")] == [1, 1, 1.0]
    leak = {"images": 3, "also_in_train": 2, "share": 0.6667, "questions": 4, "about_images_in_train": 3}
    assert leaks["test"] == leak


def test_parts_have_several_names():
    names = {"train": "train", "validation": "val", "VAL": "val", "dev": "val", "test": "test", "raw": "", "": ""}
    assert {name: part_of(name) for name in names} == names
