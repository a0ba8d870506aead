"""The audit's page: well-formed, self-contained, and without markup from data."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image
from support.html_page import HOSTILE, Page, assert_harmless
from support.rows import encoded, run, write_lines

from lookonce.datasets.audit.audit import SIDE, Section, audit, draw_contact_sheet, to_page
from lookonce.datasets.audit.findings import Corpus


@pytest.fixture
def hostile(tmp_path: Path) -> Corpus:
    """Records whose texts look like markup, and an image with such a name."""
    name = "<b onclick=x>&amp;\"'.png"
    Image.new("RGB", (1000, 50), "red").save(tmp_path / name)
    lines = [
        {"image_filename": image, "question": f"Is it {text}?", "answer": f"{text} {number}", "tag": text}
        for text in (text.replace("\ud800", "") for text in HOSTILE)  # which is refused as it is read
        for number in (1, 2)
        for image in (name, "gone.png")
    ]
    return Corpus.read([write_lines(tmp_path / "<i>train.jsonl", *lines)])


@pytest.mark.guarantee("No text of a record or of an answer becomes markup.")
def test_hostile_texts_stay_text_and_the_page_needs_no_network(hostile):
    sections = [Section(HOSTILE[0], HOSTILE[1], [(HOSTILE, [HOSTILE])])]
    page = assert_harmless(to_page(audit(hostile), sections, draw_contact_sheet(hostile)))
    shown = "".join(page.text)
    assert "<script>alert(1)</script>" in shown and "onerror=alert(1)>" in shown and page.urls()


def test_hostile_texts_are_valid_json_and_harmless_in_a_terminal(hostile):
    for words in ([], ["--json"]):
        result = run("data", "audit", hostile.files[0].path, *words)
        assert result.exit_code == 0 and "\x1b" not in result.stdout and "\x00" not in result.stdout
    assert json.loads(result.stdout)["num_questions"] == 16


def test_the_contact_sheet_depends_on_its_seed_and_shows_small_images(sample):
    corpus = Corpus.read([sample / "train.jsonl", sample / "val.jsonl"])
    sheet, again, other = (draw_contact_sheet(corpus, seed=seed, num_images=12) for seed in (1, 1, 2))
    assert sheet == again != other
    assert len({one.name for one in sheet}) == 12
    asked = {
        (file.name, record.images[0].name, turn.question, turn.answer)
        for file in corpus.files
        for record in file.records
        for turn in record.turns
    }
    names = {path.name: corpus.identity(path) for path in corpus.images}
    for one in sheet:
        same = {name for name, key in names.items() if key == names[one.name]}
        assert any((one.file, name, one.question, one.answer) in asked for name in same)
        with Image.open(io.BytesIO(base64.b64decode(one.url.partition(",")[2]))) as image:
            assert max(image.size) <= SIDE and image.format == "JPEG"


def test_an_image_that_cannot_be_decoded_is_not_on_the_contact_sheet(folder, write):
    whole = encoded(Image.effect_noise((200, 200), 90), "JPEG")
    (folder / "cut.jpg").write_bytes(whole[:2000])
    (folder / "whole.jpg").write_bytes(whole)
    corpus = Corpus.read([write(*((f"{name}.jpg", "Is it?", "yes") for name in ("cut", "whole")))])
    assert [one.name for one in draw_contact_sheet(corpus)] == ["whole.jpg"]


def test_the_command_writes_both_page_and_json(sample, tmp_path):
    splits = [sample / f"{split}.jsonl" for split in ("train", "val", "test")]
    result = run(
        "data", "audit", *splits, "--html", tmp_path / "new" / "a.html", "--tokenizer", sample / "model", "--json"
    )
    value = json.loads(result.stdout)
    assert result.exit_code == 0 and value["num_images"] == 64 and len(value["tokens"]["files"]) == 3
    page = Page((tmp_path / "new" / "a.html").read_text())
    titles = "".join(page.text)
    for title in ("Questions per image", "Tokens per image", "Answers per question", "Image sizes", "Contact sheet"):
        assert title in titles
    assert len(page.urls()) == 48


def test_only_strict_exits_1_and_only_for_errors(sample, write):
    path = write(("gone.jpg", "Is there text?", "yes"))
    for words, code in (((), 0), (("--strict",), 1)):
        result = run("data", "audit", path, *words)
        assert result.exit_code == code and "1 error." in result.stdout
    assert run("data", "audit", sample / "train.jsonl", "--strict").exit_code == 0


def test_token_options_need_a_tokenizer(sample):
    result = run("data", "audit", sample / "train.jsonl", "--max-pixels", 400)
    assert result.exit_code == 2 and "--tokenizer" in result.stderr
