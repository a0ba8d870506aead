"""Splits: by image, disjoint whatever the images' names, always the same; and the leaks of official splits."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookonce.datasets.prepare.rows import Row, families, measure_leaks, part_of, split_by_image, split_by_lists

SHARES = {"val": 0.15, "test": 0.15}


def row(key: str, image_id: str = "", **values) -> Row:
    return Row("q", "a", key, image_id=image_id, **values)


def test_6500_images_are_4550_and_975_and_975():
    rows = [row(f"key {number}", f"image {number}") for number in range(6500) for _ in range(1 + number % 3)]
    parts = split_by_image(rows, SHARES, 42)
    assert Counter(parts.values()) == {"train": 4550, "val": 975, "test": 975}


def test_the_draw_is_a_shuffle_of_the_sorted_names_by_the_seed():
    names = [f"image {number:02d}" for number in range(40)]
    parts = split_by_image([row(f"key {name}", name) for name in reversed(names)], SHARES, 7)
    random.Random("split, seed 7").shuffle(names)
    assert {parts[f"key {name}"] for name in names[:6]} == {"val"}
    assert {parts[f"key {name}"] for name in names[6:12]} == {"test"}
    assert {parts[f"key {name}"] for name in names[12:]} == {"train"}


FAMILIES = {
    "same bytes": ([row("x", "a"), row("x", "b"), row("y", "c")], 2),
    "same name": ([row("x", "a"), row("y", "a"), row("z", "b")], 2),
    "a chain": ([row("x", "a"), row("x", "b"), row("y", "b"), row("y", "c")], 1),
    "no names": ([row("x"), row("y")], 2),
    "a name like a key": ([row("a", "b"), row("b", "a")], 2),
}


@pytest.mark.parametrize(("rows", "num_families"), FAMILIES.values(), ids=FAMILIES)
def test_images_that_could_reveal_each_other_are_one_family(rows, num_families):
    found = families(rows)
    assert found.keys() == {one.key for one in rows} and len(set(found.values())) == num_families


def test_rows_with_the_same_value_of_a_together_column_stay_on_one_side():
    rows = [row(f"key {n}", f"image {n}", metadata={"sequence": n // 10}) for n in range(200)]
    parts = split_by_image(rows, SHARES, 42, ["sequence"])
    of_sequence = [{parts[f"key {n}"] for n in range(start, start + 10)} for start in range(0, 200, 10)]
    assert all(len(found) == 1 for found in of_sequence)
    assert Counter(parts.values()) == {"train": 140, "val": 30, "test": 30}


IMAGES = st.lists(
    st.builds(
        row,
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
    rows = [row(f"key {name}", name) for name, _ in asked] + [row("key a", "d"), row("key e", "e")]
    parts = [part for _, part in asked] + ["val", ""]
    leaks = measure_leaks([one.key for one in rows], parts, families(rows))
    assert [leaks["val"][key] for key in ("images", "also_in_train", "share")] == [1, 1, 1.0]
    leak = {"images": 3, "also_in_train": 2, "share": 0.6667, "questions": 4, "about_images_in_train": 3}
    assert leaks["test"] == leak


def test_parts_have_several_names():
    names = {"train": "train", "validation": "val", "VAL": "val", "dev": "val", "test": "test", "raw": "", "": ""}
    assert {name: part_of(name) for name in names} == names
