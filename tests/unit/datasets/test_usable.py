"""Records of unusable images are left out as a whole, counted and named."""

from __future__ import annotations

from pathlib import Path

from lookonce.datasets.records import Record, Turn, leave_out

A, B, C = Path("/a.png"), Path("/b.png"), Path("/c.png")


def record(number: int, *images: Path) -> Record:
    return Record(images, (Turn("Where?", "here"),), origin=f"train.jsonl:{number}")


RECORDS = [record(1, A), record(2, B), record(3, A, C), record(4), record(5, C, C)]


def test_records_are_kept_in_order_without_those_of_unusable_images():
    kept, left_out = leave_out(RECORDS, {C: "cannot decode /c.png", B: "no such file", Path("/other.png"): "?"})
    assert kept == [RECORDS[0], RECORDS[3]]
    assert (left_out.num_records, left_out.num_left_out) == (5, 3)
    assert {image.path: image.places for image in left_out.images} == {
        B: ("train.jsonl:2",),
        C: ("train.jsonl:3", "train.jsonl:5"),
    }


def test_nothing_is_left_out_if_all_images_are_usable():
    kept, left_out = leave_out(RECORDS, {})
    assert kept == RECORDS and (left_out.num_left_out, left_out.images) == (0, ())


def test_the_text_counts_all_and_names_the_first_few():
    many = [record(number, Path(f"/{number}.png")) for number in range(8)]
    _, left_out = leave_out([*many, record(9, A)], {Path(f"/{number}.png"): "empty" for number in range(8)})
    lines = left_out.text("train ").splitlines()
    assert lines[0] == "left out 8 of 9 train records, which show 8 unusable images:"
    assert lines[1] == "  /0.png: empty (train.jsonl:0)" and lines[-1] == "  and 3 more" and len(lines) == 7
