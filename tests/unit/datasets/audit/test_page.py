"""The page: well-formed, self-contained, and nothing in it that data could have made markup."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lookonce.cli import main
from lookonce.datasets.audit.audit import audit
from lookonce.datasets.audit.corpus import Material
from lookonce.datasets.audit.page import Section, to_page
from lookonce.datasets.audit.sheet import SIDE, draw_sheet
from lookonce.page.markup import document, node
from lookonce.page.plots import columns, points, shares

VOID = {"meta", "img", "link", "br"}
TAGS = {
    *("html", "head", "title", "meta", "style", "body", "main", "header", "footer", "h1", "h2", "p", "div", "span"),
    *("b", "code", "small", "details", "summary", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"),
    *("figure", "figcaption", "img", "svg", "rect", "circle", "line", "text"),
}
HOSTILE = (
    "</style></title><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!-- ' onload='alert(1)",
    "]]>&lt;b&gt;\x00\x1b[31m\ud800 \u2028 javascript:alert(1)",
)


PRINTED = st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\ufffe\uffff")


class Page(HTMLParser):
    """The elements of a page; fails where one is not closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text.append(data)

    def handle_comment(self, data):
        pytest.fail(f"a comment: {data}")

    def urls(self) -> list[str]:
        return [
            values[name] for _, values in self.found for name in ("src", "href", "data", "action") if name in values
        ]


@pytest.fixture
def hostile(tmp_path: Path) -> Material:
    """Records whose every text wants to be markup, and an image with such a name."""
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
    return Material.read([path])


def test_hostile_texts_stay_text(hostile):
    text = to_page(audit(hostile), [Section(HOSTILE[0], HOSTILE[1], [(HOSTILE, [HOSTILE])])], draw_sheet(hostile))
    page = Page(text)
    assert {tag for tag, _ in page.found} <= TAGS
    assert not [name for _, values in page.found for name in values if name.startswith("on")]
    shown = "".join(page.text)
    assert "<script>alert(1)</script>" in shown and "onerror=alert(1)>" in shown
    assert not re.search("[\x00\x1b\ud800]", text)
    text.encode("utf-8")


def test_hostile_texts_are_json_and_harmless_on_a_terminal(hostile):
    for words in ([], ["--json"]):
        result = CliRunner().invoke(main, ["data", "audit", str(hostile.files[0].path), *words])
        assert result.exit_code == 0 and "\x1b" not in result.stdout and "\x00" not in result.stdout
    assert json.loads(result.stdout)["num_questions"] == 16


def test_nothing_is_asked_of_the_network(hostile):
    text = to_page(audit(hostile), [], draw_sheet(hostile))
    page = Page(text)
    assert page.urls() and all(url.startswith("data:image/jpeg;base64,") for url in page.urls())
    assert "url(" not in text and "@import" not in text and not re.search(r'(?:src|href)="?https?:', text)
    assert any("default-src 'none'" in values.get("content", "") for _, values in page.found)


@given(st.text(PRINTED), st.text(PRINTED))
def test_any_text_comes_through_as_itself(one, other):
    page = Page(document("", "", node("p", one, node("b", other), one, title=other)))
    assert "".join(page.text) == f"\n{one}{other}{one}\n"
    assert [values["title"] for tag, values in page.found if tag == "p"] == [other]


def test_plots_of_nothing_and_of_much_are_drawn():
    for drawing in (
        columns([], "x", "y"),
        columns([(str(number), number**3) for number in range(200)], "x", "y"),
        shares([]),
        shares([("question", 10**6, [(f"answer {number}", 10) for number in range(10)])]),
        points({}, "x", "y"),
        points({(1, 1): 1, (10**5, 10**5): 10**6}, "x", "y"),
    ):
        page = Page(document("t", "", drawing))
        numbers = [
            values[name] for _, values in page.found for name in ("x", "y", "cx", "cy", "width") if name in values
        ]
        assert all(re.fullmatch(r"-?[\d.]+%?|[\w=,.-]+", number) for number in numbers)
        assert "nan" not in numbers and "inf" not in numbers


def test_parts_of_a_bar_fill_it():
    drawing = shares([("question", 40, [("yes", 20), ("no", 10), ("maybe", 4), ("a", 2), ("b", 1), ("c", 1)])])
    parts = [element for element in drawing if element.tag == "svg"]
    titles = [part.find("rect/title").text for part in parts]
    assert titles[0] == "yes: 20 (50%)" and titles[-1].startswith("all others: 3") and len(parts) == 6
    edges = [(float(part.get("x")), float(part.get("x")) + float(part.get("width"))) for part in parts]
    assert all(end <= start < end + 3 for (_, end), (start, _) in zip(edges, edges[1:], strict=False))


def test_the_sheet_follows_from_its_seed_and_shows_each_image_small(sample: Path):
    material = Material.read([sample / "train.jsonl", sample / "val.jsonl"])
    sheet = draw_sheet(material, seed=1, num_images=12)
    assert sheet == draw_sheet(material, seed=1, num_images=12) != draw_sheet(material, seed=2, num_images=12)
    assert len({one.name for one in sheet}) == 12
    asked = {
        (file.name, record.images[0].name, turn.question, turn.answer)
        for file in material.files
        for record in file.records
        for turn in record.turns
    }
    names = {path.name: material.identity(path) for path in material.pictures}
    for one in sheet:
        same = {name for name, key in names.items() if key == names[one.name]}
        assert any((one.file, name, one.question, one.answer) in asked for name in same)
        with Image.open(io.BytesIO(base64.b64decode(one.url.partition(",")[2]))) as image:
            assert max(image.size) <= SIDE and image.format == "JPEG"


def test_an_image_that_can_not_be_decoded_is_left_out_of_the_sheet(tmp_path):
    whole = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(whole, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(whole.getvalue()[:2000])
    (tmp_path / "whole.jpg").write_bytes(whole.getvalue())
    lines = [{"image_filename": f"{name}.jpg", "question": "Is it?", "answer": "yes"} for name in ("cut", "whole")]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [one.name for one in draw_sheet(Material.read([tmp_path / "train.jsonl"]))] == ["whole.jpg"]


def run(*words: object):
    return CliRunner().invoke(main, ["data", "audit", *map(str, words)])


def test_the_command_writes_page_and_json_side_by_side(sample: Path, tmp_path: Path):
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
def test_only_strict_fails_for_errors(tmp_path, strict, code):
    line = {"image_filename": "gone.jpg", "question": "Is there text?", "answer": "yes"}
    (tmp_path / "train.jsonl").write_text(json.dumps(line))
    result = run(tmp_path / "train.jsonl", *strict)
    assert result.exit_code == code and "1 error." in result.stdout


def test_strict_passes_what_has_no_error(sample: Path):
    assert run(sample / "train.jsonl", "--strict").exit_code == 0


def test_options_of_tokens_need_a_tokenizer(sample: Path):
    result = run(sample / "train.jsonl", "--image-tokens", 400)
    assert result.exit_code == 2 and "--tokenizer" in result.stderr
