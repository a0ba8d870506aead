"""Missing, broken and odd images are found, each with its reason and a record."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from lookonce.datasets.audit.image_info import inspect_images
from lookonce.datasets.audit.report import to_text
from lookonce.datasets.images import index_images
from lookonce.datasets.records import Record


def broken_images(folder: Path) -> dict[str, str]:
    """Files that are no images, and why."""
    whole = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(whole, "JPEG")
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_bytes(b"not an image")
    (folder / "cut.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    return {"empty.png": "is empty", "text.png": "no known image format", "cut.jpg": "truncated"}


@pytest.mark.parametrize("decode", [False, True])
def test_broken_images_are_reported_with_reason_and_record(folder, decode, write, look, finding_of):
    reasons = broken_images(folder)
    if not decode:
        del reasons["cut.jpg"]
    rows = [(name, "What is it?", "polyp") for name in ("a.png", "empty.png", "text.png", "cut.jpg")]
    finding = finding_of(look(write(folder / "train.jsonl", rows), decode=decode), "images-broken")
    assert {Path(item["image"]).name for item in finding.items} == reasons.keys()
    for item in finding.items:
        assert reasons[Path(item["image"]).name] in item["reason"] and item["place"].startswith("train.jsonl:")


def test_images_of_an_odd_size_are_reported(folder, picture, write, look, finding_of):
    (folder / "flat.png").write_bytes(picture(5, (400, 31)))
    (folder / "long.png").write_bytes(picture(5, (6433, 32)))
    rows = [(name, "What is it?", "polyp") for name in ("a.png", "flat.png", "long.png")]
    reasons = [item["reason"] for item in finding_of(look(write(folder / "train.jsonl", rows)), "images-odd").items]
    assert len(reasons) == 2 and "less than 32" in "".join(reasons) and "more than 200 times" in "".join(reasons)


def test_if_all_images_are_missing_the_report_says_so_once(folder, write, look):
    rows = [(f"images/{number}.png", "What is it?", "polyp") for number in range(50)]
    text = to_text(look(write(folder / "train.jsonl", rows)))
    assert text.count("cannot read image") == 1 and "none of 50 images can be read" in text
    assert "--image-root" in text


def test_images_come_in_the_order_in_which_caches_are_planned(folder, picture):
    with tarfile.open(folder / "more.tar", "w") as tar:
        for number in (7, 5, 6):
            member = tarfile.TarInfo(f"{number}.png")
            member.size = len(picture(number))
            tar.addfile(member, io.BytesIO(picture(number)))
    names = ["copy.png", "more.tar/5.png", "a.png", "gone.png", "more.tar/7.png", "c.png", "more.tar/6.png", "b.png"]
    paths = [folder / name for name in names]
    index = index_images([Record((path,), ()) for path in paths])
    found = inspect_images(paths)
    assert {path: p.key for path, p in found.items() if p.key} == index.key_of
    assert list(dict.fromkeys(p.key for p in found.values() if p.key)) == list(index.path_of)
    assert [p.size for p in found.values() if p.key == index.key_of[paths[0]]] == [
        index.size_of[index.key_of[paths[0]]]
    ] * 2
