"""`lookonce data convert --points`: answers that are points or boxes, in another unit and back."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import ExifTags, Image
from support.rows import run as run_command
from support.rows import write_lines

from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.point_units import Conversion
from lookonce.datasets.points import find_coordinates, reference_numbers
from lookonce.datasets.records import read_records
from lookonce.eval.scores.match import is_inside

run = partial(run_command, "data", "convert")
SIDES = st.integers(1, 9_999)
PARTS = st.lists(st.floats(0, 1), min_size=4, max_size=4)


def resized(size: tuple[int, int]) -> tuple[int, int]:
    """Multiples of 28, at most 1,960: smaller or larger than the image."""
    width, height = (28 * max(1, min(round(side / 28), 70)) for side in size)
    return width, height


@pytest.mark.guarantee(
    "`data convert --points` and back changes a coordinate by rounding to the two units alone, for images of any size: "
    "whole pixels of sides below 10,000 survive ratios; and a point in a box stays in the box."
)
@given(st.tuples(SIDES, SIDES), PARTS, st.sampled_from([*permutations(("pixels", "ratio", "1000", "resized"), 2)]))
def test_a_way_there_and_back_costs_rounding_alone(size, parts, units):
    there, back = (Conversion(*pair, resized) for pair in (units, units[::-1]))
    sides, between = there.sides(units[0], size), there.sides(units[1], size)
    (left, right), (top, bottom) = sorted(parts[::2]), sorted(parts[1::2])
    numbers = [part * sides[axis % 2] for axis, part in enumerate((left, top, right, bottom))]
    step, step_between = (1e-4 if unit == "ratio" else 1 for unit in units)
    numbers = [round(number / step) * step for number in numbers]
    point = [(numbers[0] + 2 * numbers[2]) / 3, numbers[1]]
    box, click = (f"[{', '.join(f'{number:.6f}' for number in each)}]" for each in (numbers, point))
    converted = there.of_text(box, size, "")
    assert is_inside(there.of_text(click, size, ""), [converted])
    for axis, (before, after) in enumerate(
        zip(numbers, reference_numbers(back.of_text(converted, size, "")), strict=True)
    ):
        bound = 0.5 * step_between * sides[axis % 2] / between[axis % 2] + 0.5 * step
        assert abs(after - before) <= bound + 1e-5
        if units[0] == "pixels" and (units[1] == "ratio" or (units[1] == "1000" and sides[axis % 2] <= 1000)):
            assert after == before


@given(st.integers(1, 4_000), st.integers(1, 4_000), st.sampled_from([None, 50_000]))
def test_the_resized_image_is_that_of_the_stock_processor(sample_processor, width, height, max_pixels):
    assume(max(width, height) <= 200 * min(width, height))
    processor = sample_processor(max_pixels)
    patches = processor.stock.get_number_of_image_patches(height, width)
    new_width, new_height = processor.resized_size((width, height))
    assert new_width * new_height == patches * processor.stock.patch_size**2
    assert {side % (processor.stock.patch_size * processor.stock.merge_size) for side in (new_width, new_height)} == {0}


@pytest.fixture(scope="module")
def sample_processor(sample):
    made = {limit: ImageProcessor(sample / "model", max_pixels=limit) for limit in (None, 50_000)}
    return made.__getitem__


@pytest.fixture
def clicks(tmp_path: Path) -> Path:
    """Records about images of odd sizes, one of them stored on its side."""
    orientation = Image.Exif()
    orientation[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (801, 333)).save(tmp_path / "a.png")
    Image.new("RGB", (333, 801)).save(tmp_path / "b.jpg", exif=orientation)
    rows = [
        {"image": "a.png", "question": "Save?", "answer": "(267, 37)", "source": "web"},
        {"image": "b.jpg", "question": "Save?", "answer": '[{"bbox_2d": [0, 0, 801, 333], "label": "2 x 3"}]'},
        {"image": "a.png", "question": "Menu?", "answers": ["x=801 y=0", "[0, 0, 9, 9]"]},
        {"image": "a.png", "question": "How long?", "answer": "5-10mm"},
    ]
    return write_lines(tmp_path / "clicks.jsonl", *rows)


def answers(path: Path) -> list[object]:
    return [record.references or record.turns[0].answer for record in read_records(path)]


def test_numbers_change_where_they_stand(clicks, sample, tmp_path):
    cases = {
        "pixels:1000": [
            "(333, 111)",
            '[{"bbox_2d": [0, 0, 1000, 1000], "label": "2 x 3"}]',
            ("x=1000 y=0", "[0, 0, 11, 27]"),
        ],
        "pixels:ratio": ["(0.3333, 0.1111)", None, ("x=1.0000 y=0.0000", "[0.0000, 0.0000, 0.0112, 0.0270]")],
    }
    for points, expected in cases.items():
        target = tmp_path / f"{points[7:]}.jsonl"
        result = run(clicks, target, "--points", points, "--json")
        assert result.exit_code == 0 and json.loads(result.stdout)["num_points"] == 4
        found = answers(target)
        assert found[3] == "5-10mm" and all(one in (two, None) for one, two in zip(expected, found, strict=False))
        again = tmp_path / f"{points[7:]}-back.jsonl"
        assert run(target, again, "--points", f"{points[7:]}:pixels").exit_code == 0
        assert answers(again) == answers(clicks) and read_records(again)[0].metadata == {"source": "web"}
    to_model = ["--points", "pixels:resized", "--model", sample / "model", "--max-pixels", 20_000]
    assert run(clicks, tmp_path / "resized.jsonl", *to_model).exit_code == 0
    width, height = ImageProcessor(sample / "model", max_pixels=20_000).resized_size((801, 333))
    assert answers(tmp_path / "resized.jsonl")[1] == f'[{{"bbox_2d": [0, 0, {width}, {height}], "label": "2 x 3"}}]'
    assert 0 < width * height <= 20_000


FORMS = {
    '[{"bbox_2d": [80, 0, 160, 33], "label": "a (3, 4)"}, {"bbox_2d": [0, 0, 801, 333], "label": "b"}]': (
        '[{"bbox_2d": [100, 0, 200, 99], "label": "a (3, 4)"}, {"bbox_2d": [0, 0, 1000, 1000], "label": "b"}]'
    ),
    "{'point_2d': [80, 33], 'label': 'b7'}": "{'point_2d': [100, 99], 'label': 'b7'}",
    '[{"point_2d": [80, 33]}, {"point_2d": [0, 333]}]': '[{"point_2d": [100, 99]}, {"point_2d": [0, 1000]}]',
    "(80, 33), (0, 0), (801, 333)": "(100, 99), (0, 0), (1000, 1000)",
    "<box>(0, 0), (80, 33)</box>": "<box>(0, 0), (100, 99)</box>",
    '{"x1": 80, "x2": 801, "y1": 33, "y2": 333}': '{"x1": 100, "x2": 1000, "y1": 99, "y2": 1000}',
    "xmax=801 xmin: 80, y_min=33 y_max=33": "xmax=1000 xmin: 100, y_min=99 y_max=99",
    "y=33 x=80": "y=99 x=100",
}


def test_several_points_and_named_ones_change_and_texts_that_may_have_some_are_counted(clicks, tmp_path):
    """A file in two units would be trained on without a word."""
    left = ["The polyp is at (80, 33).", "click(80, 33)", "<point>80 33</point>", '<p x="80" y="33">b</p>', "(1, 2, 3)"]
    rows = [one(answer) for answer in (*FORMS, *left, "1,200", "10 x 20")]
    source = write_lines(tmp_path / "forms.jsonl", *rows, one("no", question="What is at (80, 33)?"))
    result = run(source, tmp_path / "out.jsonl", "--points", "pixels:1000", "--json")
    assert answers(tmp_path / "out.jsonl") == [*FORMS.values(), *left, "1,200", "10 x 20", "no"]
    report = json.loads(result.stdout)
    assert report["num_points"] == len(FORMS) and report["num_points_left"] == 5  # "(1, 2, 3)" is none
    assert report["first_left"] == f'{source}:{len(FORMS) + 1}: "The polyp is at (80, 33)."'
    assert "5 texts with coordinates" in run(source, tmp_path / "2.jsonl", "--points", "pixels:1000").stdout


def one(answer: str, **values: object) -> dict[str, object]:
    return {"image": "a.png", "question": "Save?", "answer": answer} | values


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (one("(802, 5)"), "pixels:1000", r'"\(802, 5\)" is not in `pixels`, which is 0 to 801 and 0 to 333'),
        (one("(5, -1)"), "1000:pixels", "is not in `1000`, which is 0 to 1000"),
        (one("(0.5, 0.1)"), "pixels:1000", "these are ratios and not `pixels`; write: --points ratio:1000"),
        (one("[50, 60, 20, 90]"), "pixels:1000", "no box of left, top, right and bottom"),
        (one('{"x1": 50, "x2": 20, "y1": 1, "y2": 2}'), "pixels:1000", "no box of left, top, right and bottom"),
        (one("(1, 2), (3, 4), (5, 334)"), "pixels:1000", "is not in `pixels`"),
        (one("yes"), "pixels:1000", "no answer is a point or a box"),
        (one("(1, 5)", image="gone.png"), "pixels:ratio", "gone.png.*its points cannot be converted"),
        (one("(1, 5)", image=None, images=["a.png", "a.png"]), "pixels:ratio", "it has 2 images, not 1"),
        (one("(1, 5)"), "pixels:pixels", "write FROM:TO, two different ones of pixels, ratio, 1000, resized"),
        (one("(1, 5)"), "resized:1000", "`resized` depends on the model; add --model DIR"),
        (one("(1, 5)"), "pixels:1000 --max-pixels 9", "--model and --max-pixels are for the unit `resized`"),
    ],
)
def test_what_is_not_in_the_unit_is_refused(clicks, row, options, message):
    values = {name: value for name, value in row.items() if value is not None}
    source = write_lines(clicks.with_name("one.jsonl"), values)
    result = run(source, clicks.with_name("out.jsonl"), "--points", *options.split())
    assert result.exit_code and not clicks.with_name("out.jsonl").exists()
    assert result.exc_info[0] is SystemExit
    assert re.search(message, result.stderr.replace("\n", " ")), result.stderr


def test_a_long_text_is_searched_in_a_moment():
    """A second at most, where each of three runs of spaces was tried with each length of the others."""
    began = time.perf_counter()
    assert find_coordinates(f"x{' ' * 20_000}(1, 2)")
    assert time.perf_counter() - began < 5
