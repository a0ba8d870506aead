"""Records: read, written, and those that are malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.images import image_key, index_images
from lookonce.datasets.records import (
    Collector,
    Record,
    RecordsFile,
    Turn,
    by_kind,
    kind_of,
    read_records,
    write_records,
)
from lookonce.errors import ImageError, RecordsError

TURN = {"question": "Is there text?", "answer": "yes"}
FLAT = {"image_filename": "a.jpg", **TURN}
TURN_WANTED = "a turn must be an object with `question` and `answer`"


def canonical(**values: Any) -> str:
    return json.dumps({"images": ["a.jpg"], "turns": [TURN]} | values)


def flat(**values: Any) -> str:
    return json.dumps(FLAT | values)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "train.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


YES = (Turn("Is there text?", "yes"),)


def test_one_file_may_mix_canonical_and_flat_records_and_origins_count_blank_lines(tmp_path):
    path = write(tmp_path, "", flat(question="first"), "  \t", canonical(), flat(question="third"))
    found = [(record.turns[0].question, record.origin) for record in read_records(path)]
    assert found == [("first", f"{path}:2"), ("Is there text?", f"{path}:4"), ("third", f"{path}:5")]


NOT_EMPTY = "must be text that is not empty"
BAD_LINES = {
    "neither format": ('{"a": 1}', "the key `turns` (canonical format) or `question` (flat format), got ['a']"),
    "unknown key": (canonical(label=1), "unknown key `label`; put extra keys under `metadata`"),
    "turns not a list": (canonical(turns=TURN), "`turns` must be a list, got an object with ['answer', 'question']"),
    "turn without answer": (canonical(turns=[{"question": "a"}]), TURN_WANTED),
    "system empty": (canonical(system=""), f"`system` {NOT_EMPTY}, got ''"),
    "metadata a list": (canonical(metadata=["a"]), "`metadata` must be an object, got a list"),
    "images text": (canonical(images="a.jpg"), "`images` must be a list, got 'a.jpg'"),
    "flat without image": (json.dumps(TURN), "expected the key `image_filename`, got ['answer', 'question']"),
    "a key twice": (flat()[:-1] + ', "answer": "c"}', "an object has the key 'answer' twice; keep one"),
    "no file of an id": (json.dumps(TURN | {"img_id": "a7"}), "no file in the image root is called 'a7'"),
    "nested too deep": ("[" * 100_000, "not JSON that can be read"),
}


@pytest.mark.parametrize(("line", "expected"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_bad_line_is_refused_with_file_line_and_what_was_expected(tmp_path, line, expected):
    path = write(tmp_path, flat(), "", line, flat())
    with pytest.raises(RecordsError) as refusal:
        read_records(path)
    assert str(refusal.value).startswith(f"{path}:3: ")
    assert expected in str(refusal.value)


def test_a_missing_file_is_refused_with_its_absolute_path_and_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecordsError, match="check the path, or the `data` section of the run file") as refusal:
        read_records(Path("train.jsonl"))
    assert str(tmp_path / "train.jsonl") in str(refusal.value)
    with pytest.raises(RecordsError, match="cannot read"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("name", "kept"), [("../root-2/a.jpg", "../root-2/a.jpg"), ("{folder}/elsewhere/a.jpg", "../elsewhere/a.jpg")]
)
def test_image_that_leads_out_of_the_root_keeps_its_dots_and_is_never_opened(tmp_path, name, kept):
    root = tmp_path / "root"
    for folder in ("root", "root-2", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jpg").write_bytes(b"pixels")
    (record,) = read_records(write(tmp_path, flat(image_filename=name.format(folder=tmp_path))), image_root=root)
    assert [str(image) for image in record.images] == [f"{root}/{kept}"]
    with pytest.raises(ImageError, match="it leads out of the image root"):
        image_key(record.images[0])


def test_image_path_inside_the_root_is_normalised(tmp_path):
    names = {"b/../a.jpg": "a.jpg", "./a.jpg": "a.jpg", "b//c.jpg": "b/c.jpg", "..a.jpg": "..a.jpg"}
    records = read_records(write(tmp_path, *(flat(image_filename=name) for name in names)))
    assert [record.images for record in records] == [(tmp_path / file,) for file in names.values()]


def test_link_inside_the_root_is_followed(tmp_path):
    shared, root = tmp_path / "shared", tmp_path / "root"
    for folder in (shared, root):
        folder.mkdir()
    (shared / "a.jpg").write_bytes(b"pixels")
    (root / "images").symlink_to(shared)
    records = read_records(write(root, flat(image_filename="images/a.jpg")))
    assert index_images(records).key_of == {root / "images" / "a.jpg": image_key(shared / "a.jpg")}


def test_records_are_written_as_canonical_readable_jsonl(tmp_path):
    record = Record(images=(tmp_path / "images" / "a.jpg",), turns=(Turn("Où ?", "là"),), metadata={"stage": 1})
    write_records(tmp_path / "train.jsonl", [record])
    assert (tmp_path / "train.jsonl").read_text(encoding="utf-8") == (
        '{"images": ["images/a.jpg"], "turns": [{"question": "Où ?", "answer": "là"}],'
        ' "system": null, "metadata": {"stage": 1}}\n'
    )


@pytest.mark.parametrize("name", ["b.jpg", "images/../b.jpg"], ids=["elsewhere", "as it is read"])
def test_writing_an_image_outside_the_root_is_refused_and_the_old_file_is_kept(tmp_path, name):
    path, root = write(tmp_path, flat()), tmp_path / "images"
    before = path.read_bytes()
    with pytest.raises(RecordsError, match="b.jpg lies outside .*images; move it there or give another image root"):
        write_records(path, [Record((root / "a.jpg",), YES), Record((tmp_path / name,), YES)], image_root=root)
    assert path.read_bytes() == before


NO_NUMBER = flat(answer=3)
CUT = '{"question": '
LINES = [CUT, NO_NUMBER, flat(answer="3"), flat(answer=True), "", flat(question=" "), "[1, 2]", flat()]


def collected(path, **options):
    malformed = Collector()
    records = list(RecordsFile(path, broken=malformed, **options))
    return [record.turns[0].answer for record in records], malformed


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_all_malformed_records_are_collected_and_the_others_are_read(tmp_path, name):
    path, places = tmp_path / name, [f":{number}" for number in (1, 2, 4, 6, 7)]
    path.write_text("\n".join(LINES))
    if name == "a.json":
        path.write_text(f"[{','.join(line for line in LINES if line not in ('', CUT))}]")
        places = [f": record {number}" for number in (1, 3, 4, 5)]
    answers, malformed = collected(path)
    assert answers == ["3", "yes"] and [one.place for one in malformed] == [f"{path}{place}" for place in places]
    assert not any(str(path) in one.reason for one in malformed)
    kinds = by_kind(malformed)  # a mistake is one kind, and the most frequent comes first
    assert [len(kind.places) for kind in kinds] == [2, *[1] * (len(places) - 2)]
    assert kinds[0].text().startswith("2 times: `answer` must be text that is not empty, got 3; put it into quotes")
    assert kinds[0].text().endswith(f"({path}{places[-4]}, {path}{places[-3]})")
    (tmp_path / "cut.jsonl").write_text(CUT)
    assert [one.place for one in collected(tmp_path / "cut.jsonl")[1]] == [f"{tmp_path}/cut.jsonl:1"]


def test_messages_that_differ_in_values_are_one_kind():
    for one, other in (
        ("`answer` must be text, got 3", "`answer` must be text, got [4, '; x']"),
        ("message 3 has the role 'tool'; not supported", 'message 5 has the role "to\'ol"; not supported'),
        ("expected the key `a`, got ['b']; look", "expected the key `a`, got ['c', 'd', 'e']; look"),
    ):
        assert kind_of(one) == kind_of(other)
    assert kind_of("`answer` must be text, got 3") != kind_of("`question` must be text, got 3")
