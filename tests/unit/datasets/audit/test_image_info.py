"""Missing, broken and odd images are found, each with its reason and a record."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from support.rows import encoded, png

from lookonce.datasets.audit.report import to_text


def broken_images(folder: Path) -> dict[str, str]:
    """Files that are no images, and why."""
    whole = encoded(Image.effect_noise((200, 200), 90), "JPEG")
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_bytes(b"not an image")
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    return {"empty.png": "is empty", "text.png": "unknown image format", "cut.jpg": "truncated"}


@pytest.mark.parametrize("decode", [False, True])
def test_broken_images_are_reported_with_reason_and_record(folder, decode, look_at, finding_of):
    reasons = broken_images(folder)
    if not decode:
        del reasons["cut.jpg"]
    rows = [(name, "What is it?", "polyp") for name in ("a.png", "empty.png", "text.png", "cut.jpg")]
    finding = finding_of(look_at(*rows, decode=decode), "images-broken")
    assert {Path(item["image"]).name for item in finding.items} == reasons.keys()
    for item in finding.items:
        assert reasons[Path(item["image"]).name] in item["reason"] and item["place"].startswith("train.jsonl:")


def test_images_of_an_odd_size_are_reported(folder, look_at, finding_of):
    (folder / "flat.png").write_bytes(png(5, (400, 31)))
    rows = [(name, "What is it?", "polyp") for name in ("a.png", "flat.png")]
    [item] = finding_of(look_at(*rows), "images-odd").items
    assert item["reason"] == "400 x 31 pixels, less than 32 on a side"


NOISE = Image.effect_noise((64, 48), 90)
FRAMES = {"save_all": True, "append_images": [Image.effect_noise((64, 48), 50)]}
TRAITS = {
    "rgba.png": ("images-alpha", "warning", NOISE.convert("RGBA"), {}),
    "palette.png": ("images-transparent", "warning", NOISE.convert("P"), {"transparency": 3}),
    "rgb.png": ("images-transparent", "warning", NOISE.convert("RGB"), {"transparency": (1, 2, 3)}),
    "deep.png": ("images-deep", "warning", NOISE.convert("I;16"), {}),
    "integers.tif": ("images-deep", "warning", NOISE.convert("I"), {}),
    "frames.gif": ("images-animated", "warning", NOISE, FRAMES),
    "pages.tif": ("images-animated", "warning", NOISE, FRAMES),
    "inks.jpg": ("images-cmyk", "note", NOISE.convert("CMYK"), {}),
    "plain.jpg": (None, None, NOISE.convert("RGB"), {}),
    "lab.tif": (None, None, Image.new("LAB", (64, 48), (90, 3, 4)), {}),
    "stereo.mpo": (None, None, NOISE.convert("RGB"), FRAMES),
}


@pytest.mark.parametrize("name", TRAITS)
def test_what_8_bit_rgb_does_not_keep_of_an_image_is_reported(folder, look_at, name):
    code, level, image, options = TRAITS[name]
    image.save(folder / name, **options)
    rows = [("a.png", "What is it?", "polyp"), (name, "What is it?", "polyp")]
    findings = [one for one in look_at(*rows).findings if one.code.startswith("images-")]
    assert [(one.code, one.level, one.count) for one in findings] == ([(code, level, 1)] if code else [])
    for one in findings:
        assert one.says.startswith("1 image ") and name in one.examples[0] and "mode " in one.examples[0]


def test_if_all_images_are_missing_the_report_says_so_once(folder, look_at):
    rows = [(f"images/{number}.png", "What is it?", "polyp") for number in range(50)]
    text = to_text(look_at(*rows))
    assert text.count("cannot read image") == 1 and "50 of 50 images cannot be read" in text
    assert "--image-root" in text
