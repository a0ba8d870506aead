"""Variants of images: their keys and pixels follow from image key, recipe and number, and answers stay true of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lookonce.datasets.augment import Augment, EpochVariants
from lookonce.datasets.records import Record, Turn
from lookonce.errors import UsageError

ALL = {"rotate": 20, "crop": 0.7, "hflip": True, "brightness": 0.4, "contrast": 0.4}
KEY = "ab" * 32


def picture(width: int = 96, height: int = 64) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def record(question: str, answer: str) -> Record:
    return Record((Path("/a.jpg"),), (Turn("Is there text?", "no"), Turn(question, answer)), origin="train.jsonl:7")


def test_keys_and_draws_are_the_same_in_every_version():
    """Other ones would encode every variant again, and the caches that people have would be of no use."""
    variant = next(Augment(**ALL, variants=9, force=True).of(KEY))
    assert variant.key == "4cc0b39a9a9c6fec4399274c8635ab039c9c71b04f92b81eab46199dd85b1686"
    assert [round(1000 * variant._draw(name)) for name in ("rotate", "crop", "x")] == [553, -184, -347]


@pytest.mark.parametrize("change", [{name: value} for name, value in ALL.items() if name != "hflip"], ids=str)
def test_each_change_alone_changes_pixels_and_keeps_the_size(change):
    image, variants = picture(), [*Augment(variants=9, **change).of(KEY)]
    shown = [variant.picture(image) for variant in variants]
    assert {one.size for one in shown} == {image.size}
    assert len({one.tobytes() for one in shown}) == 8
    assert len({variant.key for variant in variants}) == 8
    assert pixels(image).tolist() == pixels(picture()).tolist()  # unchanged itself


def test_a_mirror_and_colours_are_what_their_names_say():
    image = picture()
    [mirrored] = Augment(variants=2, hflip=True).of(KEY)
    assert mirrored.picture(image).tobytes() == image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()
    for variant in Augment(variants=9, brightness=0.4).of(KEY):
        expected = np.clip(pixels(image) * (1 + 0.4 * variant._draw("brightness")), 0, 255)
        assert abs(pixels(variant.picture(image)) - expected).max() <= 1
    for variant in Augment(variants=9, contrast=0.4).of(KEY):
        around = np.asarray(image.convert("L")).mean()
        expected = np.clip(around + (pixels(image) - around) * (1 + 0.4 * variant._draw("contrast")), 0, 255)
        assert abs(pixels(variant.picture(image)) - expected).max() <= 2


def test_a_marked_pixel_lies_where_the_recipe_moves_it():
    """By hand: a point of the image, shown where angle, side and centre of the drawn part put it."""
    size, mark = (200, 160), np.array([120.5, 70.5])
    image = Image.new("RGB", size)
    image.paste("white", (118, 68, 123, 73))
    for variant in Augment(variants=30, rotate=30, crop=0.8, hflip=True).of(KEY):
        angle, side = np.radians(30 * variant._draw("rotate")), 1 - 0.2 * (1 + variant._draw("crop")) / 2
        moved = (1 - side) * np.array([variant._draw("x"), variant._draw("y")])
        offset = mark - np.array(size) / 2 * (1 + moved)
        turned = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]) @ offset / side
        expected = np.array(size) / 2 + turned * (-1 if variant.number % 2 else 1, 1)
        rows, columns = np.nonzero(pixels(variant.picture(image))[..., 0] > 127)
        assert abs(columns.mean() + 0.5 - expected[0]) < 0.6 and abs(rows.mean() + 0.5 - expected[1]) < 0.6


def test_every_epoch_shows_one_variant_and_each_is_seen_before_any_is_again():
    augment = Augment(variants=4, rotate=5)
    images, of_seed = [f"{number:064d}" for number in range(200)], EpochVariants(augment, 7)
    numbers = {variant.key: variant.number for key in images for variant in augment.of(key)} | dict.fromkeys(images, 0)
    seen = np.array([[numbers[key] for key in of_seed.keys(images, epoch)] for epoch in range(8)])
    assert all(sorted(column) == [0, 1, 2, 3] for column in [*seen[:4].T, *seen[4:].T])
    assert (seen[:4] != seen[4:]).any()
    assert all(35 <= number <= 65 for number in Counter(seen[0].tolist()).values())  # images are not in step
    assert EpochVariants(augment, 8).keys(images, 0) != of_seed.keys(images, 0)
    assert of_seed.keys(images[::-1], 3) == of_seed.keys(images, 3)[::-1]


POINTS = [
    ("Where?", "[120, 44]"),
    ("Click it", '{"bbox_2d": [1, 2, 30, 40]}'),
    ("Where?", "x=0.3, y=0.4"),
    ("Where are they?", "(1, 2), (3, 4), (5, 6)"),
    ("Find all", '[{"bbox_2d": [1, 2, 3, 4], "label": "a"}, {"bbox_2d": [5, 6, 7, 8], "label": "b"}]'),
]
AMONG_WORDS = [
    ("What is at (120, 44)?", "a polyp"),
    ("What is in [1, 2, 30, 40]?", "no"),
    ("Where?", "The polyp is at (120, 34)."),
    ("Where?", '<point x="61.5" y="40.4" alt="b">b</point>'),
]
SIDED = [
    ("Which side?", "Left"),
    ("Where is it?", "upper-left; center"),
    ("Is it in the right_lung?", "no"),
    ("The leftmost polyp?", "1"),
]
REFUSED = [
    *(
        ({name: value, "variants": 2}, *turn, name)
        for name, value in ALL.items()
        if name in ("rotate", "crop", "hflip")
        for turn in [*POINTS, *AMONG_WORDS]
    ),
    *(({"hflip": True, "variants": 2}, *turn, "left and right") for turn in SIDED),
    ({"rotate": 46}, *SIDED[0], "left and right"),
    ({"rotate": 1, "force": True}, *POINTS[0], "brightness and contrast"),
]
ALLOWED = [
    *(({"brightness": 0.2, "contrast": 0.2}, *turn) for turn in [*POINTS, *AMONG_WORDS, *SIDED]),
    *(({"hflip": True, "rotate": 90, "force": True}, *turn) for turn in [*SIDED, *AMONG_WORDS]),
    *(({"rotate": 45, "crop": 0.5}, *turn) for turn in SIDED),
    *(
        ({"hflip": True, "variants": 2}, "How many?", text)
        for text in ("2", "5-10mm", "bright", "cleft", "copyrighted", "1,200", "one of (1, 2, 3)")
    ),
]


@pytest.mark.parametrize(("recipe", "question", "answer", "reason"), REFUSED)
def test_a_recipe_that_makes_answers_wrong_is_refused_with_the_record(recipe, question, answer, reason):
    with pytest.raises(UsageError, match=reason) as refused:
        Augment(**recipe).check([record("How many?", "2"), record(question, answer)])
    assert "train.jsonl:7" in str(refused.value)
    Augment(**recipe).check([Record((), record(question, answer).turns)])  # no image that is changed


@pytest.mark.parametrize(("text", "reason"), [("right", "left and right"), ("(1, 2)", "the point in the answer")])
def test_other_right_answers_are_checked_too(text, reason):
    other = Record((Path("/a.jpg"),), (Turn("Where?", "there"),), metadata={"references": ["there", text]})
    with pytest.raises(UsageError, match=reason):
        Augment(hflip=True, variants=2).check([other])


@pytest.mark.parametrize(("recipe", "question", "answer"), ALLOWED)
def test_a_recipe_that_keeps_answers_true_or_is_forced_is_taken(recipe, question, answer):
    Augment(**recipe).check([record(question, answer)])


def test_a_recipe_that_changes_nothing_is_refused():
    with pytest.raises(ValueError, match="4 variants are all the image itself"):
        Augment()
    with pytest.raises(ValueError, match="hflip alone makes 2 variants, not 4"):
        Augment(hflip=True)
    assert [*Augment(variants=1).of(KEY)] == []
