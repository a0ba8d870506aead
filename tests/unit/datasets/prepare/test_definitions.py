"""Dataset definitions: mistakes are named by key, and known datasets are read in the layout as published."""

from __future__ import annotations

import json
from itertools import count, product
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pytest
import yaml
from support.rows import jpeg_of, write_parquet

from lookonce.datasets.curriculum import read_stage_map
from lookonce.datasets.prepare.definition import FOLDER, find_definition, known_datasets, read_definition
from lookonce.datasets.prepare.rows import Rule
from lookonce.datasets.prepare.run import Options, Prepared, prepare
from lookonce.datasets.records import Record, Turn, read_records
from lookonce.errors import SourceError, UsageError

KNOWN = ["kvasir-vqa", "kvasir-vqa-x1", "path-vqa", "slake", "vqa-rad"]


def test_the_readme_names_all_known_datasets():
    assert known_datasets() == KNOWN
    readme = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_definition_has_the_name_of_its_file_a_licence_and_a_homepage(name):
    definition = find_definition(name)
    assert definition.name == name and definition.title and definition.licence != "unknown"
    assert definition.homepage.startswith("https://") and definition.paper.startswith("https://")
    assert definition.hub is None or definition.hub.revision is None or len(definition.hub.revision) == 40


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rule": []}, "rule: unknown key; did you mean `rules`?"),
        ({"columns": {"imgae": "a"}}, "columns.imgae: unknown key; did you mean `image`?"),
        ({"columns": {"metadata": {"original": "a"}}}, "metadata `original` is written by prepare itself"),
        ({"images": ["../{image}"]}, "must be a path below the source's folder, without `..`"),
        ({"split": {"shares": {"val": 0.8, "test": 0.3}}}, "val and test are 1.1 together"),
        ({"rules": [{"name": "a", "rule": "drop"}]}, "rules[0]: "),
        ({"rules": [{"name": "a", "rule": "drop_rows", "answers": []}]}, "rules[0].drop_rows.answers: unknown key"),
        ({"rules": [{"name": "a", "rule": "strip_spaces"}] * 2}, "two rules are called `a`"),
        ({"hub": {"id": "no-owner"}}, "hub.id: "),
    ],
)
def test_mistakes_in_a_definition_are_named_by_key(tmp_path, values, message):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "x"} | values))
    with pytest.raises(UsageError, match="mine.yaml") as refusal:
        read_definition(path)
    assert message in str(refusal.value)


@pytest.mark.parametrize("text", ["- a", "just text", "a: [", ""])
def test_a_file_without_a_definition_is_refused(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UsageError, match="mine.yaml"):
        find_definition(str(tmp_path / "mine.yaml"))


def test_an_unknown_name_is_refused_with_the_known_names():
    with pytest.raises(UsageError, match="did you mean `kvasir-vqa`.*path-vqa, slake, vqa-rad, or name a YAML"):
        find_definition("kvasir_vqa")


def test_the_examples_in_the_readme_are_definitions_and_a_stage_map(tmp_path):
    text = (FOLDER / "README.md").read_text()
    *examples, stages = [block.partition("```")[0] for block in text.split("```yaml\n")[1:]]
    (tmp_path / "stages.yaml").write_text(stages)
    assert len(read_stage_map(tmp_path / "stages.yaml").questions) == len(examples) == 2
    for example in examples:
        (tmp_path / "mine.yaml").write_text(example)
        assert read_definition(tmp_path / "mine.yaml").name == "my-set"
    assert {rule.rule for rule in read_definition(tmp_path / "mine.yaml").rules} == {
        model.model_fields["rule"].annotation.__args__[0] for model in (get_args(get_args(Rule)[0]))
    }


def write_images(folder: Path, images: dict[str, object]) -> None:
    """Write files with the bytes that are unique to a name."""
    for name, of in images.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(jpeg_of(of))


def made(name: str, tmp_path: Path, **options: Any) -> Prepared:
    return prepare(name, tmp_path / "out", Options(source=str(tmp_path / "in"), **options))


def records_of(prepared: Prepared, part: str) -> list[Record]:
    return read_records(prepared.folder / f"{part}.jsonl")


def counts(prepared: Prepared, key: str = "records") -> dict[str, int]:
    return {part: number for part, number in prepared.report["split"][key].items() if number}


def test_kvasir_vqa_in_the_layout_of_the_hub(tmp_path):
    count, size = "How many instrumnets are in the image?", "What is the size of the polyp?"
    rows = [
        {"image": {"bytes": jpeg_of(number), "path": f"cl{number}.jpg"}, "source": "Polyps", "img_id": f"cl{number}"}
        | {"question": question, "answer": answer}
        for number in range(20)
        for question, answer in [(count, "0"), (size, ">20"), (size, "<5mm")]
    ]
    rows.append(rows[0] | {"question": "none", "answer": None})
    for number in range(3):
        write_parquet(tmp_path / "in" / "data" / f"{number:05d}.parquet", rows[number * 21 : number * 21 + 21])
    prepared = made("kvasir-vqa", tmp_path)
    assert counts(prepared, "images") == {"train": 14, "val": 3, "test": 3}
    left_out = {"no question or no answer": 1, "merged into another row's record": 20}
    assert prepared.report["rows"]["left_out"] == left_out
    of_count, of_size = records_of(prepared, "val")[:2]
    assert of_count.turns == (Turn("How many instruments are in the image?", "0"),)
    assert of_count.metadata == {
        "img_id": of_count.images[0].stem,
        "category": "count",
        "stage": 2,
        "source": "Polyps",
        "original": [{"question": count, "answer": "0"}],
    }
    assert of_size.metadata["references"] == [">20mm", "<5mm"] and of_size.turns[0].answer == ">20mm"
    assert [pair["answer"] for pair in of_size.metadata["original"]] == [">20", "<5mm"]
    assert of_size.images[0].read_bytes() == jpeg_of(int(of_size.images[0].stem[2:]))


X1 = {"image": pa.string(), "complexity": pa.int64(), "question_class": pa.list_(pa.string())}
URL = "https://huggingface.co/datasets/SimulaMet/Kvasir-VQA-x1/resolve/main/images/{}.jpg"


@pytest.fixture
def x1(tmp_path):
    """Ten questions about each of ten images; one question about each of the first six is in the official test."""
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for image, number in product(range(10), range(10)):
        row = {"img_id": f"cl{image}", "complexity": 1 + number % 3, "question": f"What is shown ({number})?"}
        row |= {"original": json.dumps([{"q": "Is there text?", "a": "no"}]), "answer": "No text is shown."}
        row |= {"question_class": ["text"], "image": URL.format(f"cl{image}")}
        parts["test" if (number == 9 and image < 6) or image == 9 else "train"].append(row)
    for part, rows in parts.items():
        write_parquet(tmp_path / "in" / "data" / f"{part}-00000-of-00001.parquet", rows, X1)
    write_images(tmp_path / "in" / "images", {f"cl{image}.jpg": f"cl{image}.jpg" for image in range(10)})


def test_kvasir_vqa_x1_is_split_by_image_or_as_published_and_the_leak_of_that_is_reported(tmp_path, x1):
    prepared = made("kvasir-vqa-x1", tmp_path)
    assert counts(prepared) == {"train": 60, "val": 20, "test": 20}
    assert all(leak["also_in_train"] == 0 for leak in prepared.report["split"]["leaks"].values())
    own = prepared.report["official_split"]
    assert own["records"] == {"train": 84, "val": 0, "test": 16}
    leak = {"images": 7, "also_in_train": 6, "share": 0.8571, "questions": 16, "about_images_in_train": 6}
    assert own["leaks"]["test"] == leak
    record = records_of(prepared, "test")[0]
    assert record.metadata["question_class"] == ["text"] and record.metadata["complexity"] == 1
    assert json.loads(record.metadata["atomic"]) == [{"q": "Is there text?", "a": "no"}]
    assert record.images[0].read_bytes() == jpeg_of(record.images[0].name)
    prepared = prepare("kvasir-vqa-x1", tmp_path / "official", Options(str(tmp_path / "in"), split="official"))
    assert counts(prepared) == {"train": 84, "test": 16}
    assert prepared.report["split"]["leaks"]["test"]["share"] == 0.8571
    assert prepared.report["official_split"] is None
    assert {record.metadata["official_split"] for record in records_of(prepared, "test")} == {"test"}


@pytest.mark.parametrize("name", ["vqa-rad", "path-vqa"])
def test_datasets_without_image_names_use_keys_as_names(tmp_path, name):
    parts = {"train": range(6), "test": range(4, 8)} | ({"validation": range(8, 10)} if name == "path-vqa" else {})
    for part, images in parts.items():
        texts = {"question": f" what is it ({part})?", "answer": "a lung"}
        rows = [{"image": {"bytes": jpeg_of(image), "path": None}, **texts} for image in images]
        write_parquet(tmp_path / "in" / "data" / f"{part}-00000-of-00001-eb8844.parquet", rows)
    prepared = made(name, tmp_path, split="official")
    assert counts(prepared) == {"train": 6, "test": 4} | ({"val": 2} if name == "path-vqa" else {})
    assert prepared.report["split"]["leaks"]["test"]["share"] == 0.5
    record = records_of(prepared, "train")[0]
    assert record.turns[0].question == "what is it (train)?" and len(record.images[0].stem) == 64


def test_slake_has_json_arrays_beside_a_folder(tmp_path):
    (tmp_path / "in").mkdir()
    row = {"location": "Abdomen", "modality": "MRI", "answer_type": "OPEN", "base_type": "vqa"}
    row |= {"triple": ["vhead", "_", "_"]}
    asked = [("en", "What modality is it?"), ("zh", "这是什么模态？")]
    numbers = count(1)
    for part, images in {"train": (0, 1), "validation": (2,), "test": (3,)}.items():
        rows = [
            {"img_id": image, "img_name": f"xmlab{image}/source.jpg", "qid": next(numbers), "question": question}
            | {"answer": "MRI", "q_lang": language, "content_type": "Modality"}
            | row
            for image in images
            for language, question in asked
        ]
        (tmp_path / "in" / f"{part}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    images = {f"imgs/xmlab{image}/source.jpg": image for image in range(4)}
    write_images(tmp_path / "in", images)
    prepared = made("slake", tmp_path)
    assert counts(prepared) == {"train": 4, "val": 2, "test": 2}
    english, chinese = records_of(prepared, "val")
    assert english.images[0].name == "2.jpg" and english.images[0].read_bytes() == jpeg_of(2)
    assert chinese.turns[0].question == "这是什么模态？"
    metadata = {"img_id": "2", "official_split": "val", "language": "en", "category": "Modality", "qid": 5}
    assert english.metadata == metadata | row


def test_a_dataset_that_is_not_downloaded_is_refused_with_its_homepage(tmp_path):
    with pytest.raises(SourceError, match="is not downloaded: get it from https://.*/SLAKE, unpack.*--source DIR"):
        prepare("slake", tmp_path / "out", Options())
