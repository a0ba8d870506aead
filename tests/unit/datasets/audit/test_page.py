"""The audit's page: well-formed, self-contained, and without markup from data."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image
from support.html_page import HOSTILE, Page, assert_harmless

from lookonce.cli import main
from lookonce.datasets.audit.audit import audit
from lookonce.datasets.audit.corpus import Corpus
from lookonce.datasets.audit.report import SIDE, Section, draw_contact_sheet, to_page


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
    path = tmp_path / "<i>train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Corpus.read([path])


def test_hostile_texts_stay_text(hostile):
    text = to_page(
        audit(hostile), [Section(HOSTILE[0], HOSTILE[1], [(HOSTILE, [HOSTILE])])], draw_contact_sheet(hostile)
    )
    shown = "".join(assert_harmless(text).text)
    assert "<script>alert(1)</script>" in shown and "onerror=alert(1)>" in shown


def test_hostile_texts_are_valid_json_and_harmless_in_a_terminal(hostile):
    for words in ([], ["--json"]):
        result = CliRunner().invoke(main, ["data", "audit", str(hostile.files[0].path), *words])
        assert result.exit_code == 0 and "\x1b" not in result.stdout and "\x00" not in result.stdout
    assert json.loads(result.stdout)["num_questions"] == 16


def test_the_page_needs_no_network(hostile):
    assert assert_harmless(to_page(audit(hostile), [], draw_contact_sheet(hostile))).urls()


def test_the_contact_sheet_depends_on_its_seed_and_shows_small_images(sample):
    corpus = Corpus.read([sample / "train.jsonl", sample / "val.jsonl"])
    sheet = draw_contact_sheet(corpus, seed=1, num_images=12)
    assert (
        sheet == draw_contact_sheet(corpus, seed=1, num_images=12) != draw_contact_sheet(corpus, seed=2, num_images=12)
    )
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


def test_an_image_that_cannot_be_decoded_is_not_on_the_contact_sheet(tmp_path):
    whole = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(whole, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(whole.getvalue()[:2000])
    (tmp_path / "whole.jpg").write_bytes(whole.getvalue())
    lines = [{"image_filename": f"{name}.jpg", "question": "Is it?", "answer": "yes"} for name in ("cut", "whole")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [one.name for one in draw_contact_sheet(Corpus.read([tmp_path / "train.jsonl"]))] == ["whole.jpg"]


def run(*words: object):
    return CliRunner().invoke(main, ["data", "audit", *map(str, words)])


def test_the_command_writes_both_page_and_json(sample, tmp_path):
    splits = [sample / f"{split}.jsonl" for split in ("train", "val", "test")]
    result = run(*splits, "--html", tmp_path / "new" / "a.html", "--tokenizer", sample / "model", "--json")
    value = json.loads(result.stdout)
    assert result.exit_code == 0 and value["num_images"] == 64 and len(value["tokens"]["files"]) == 3
    page = Page((tmp_path / "new" / "a.html").read_text())
    titles = "".join(page.text)
    for title in ("Questions per image", "Tokens per image", "Answers per question", "Image sizes", "Contact sheet"):
        assert title in titles
    assert len(page.urls()) == 48


@pytest.mark.parametrize(("strict", "code"), [((), 0), (("--strict",), 1)])
def test_only_strict_exits_1_for_errors(tmp_path, strict, code):
    line = {"image_filename": "gone.jpg", "question": "Is there text?", "answer": "yes"}
    (tmp_path / "train.jsonl").write_text(json.dumps(line))
    result = run(tmp_path / "train.jsonl", *strict)
    assert result.exit_code == code and "1 error." in result.stdout


def test_strict_exits_0_without_errors(sample):
    assert run(sample / "train.jsonl", "--strict").exit_code == 0


def test_token_options_need_a_tokenizer(sample):
    result = run(sample / "train.jsonl", "--image-tokens", 400)
    assert result.exit_code == 2 and "--tokenizer" in result.stderr
