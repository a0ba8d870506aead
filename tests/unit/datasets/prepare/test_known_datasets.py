"""Each known dataset is read in the layout in which it is published."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from lookonce.datasets.prepare.run import Options, Prepared, prepare
from lookonce.datasets.records import Record, read_records
from lookonce.errors import ImageError, SourceError

EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_parquet(path: Path, rows: list[dict], **types) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(rows[0])
    kinds = {"image": EMBEDDED, "complexity": pa.int64(), "question_class": pa.list_(pa.string())} | types
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in names])
    parquet.write_table(pa.Table.from_pylist(rows, schema=schema), path)


@pytest.fixture
def write_images(jpeg) -> Callable[[Path, list[str]], None]:
    def write(folder: Path, names: list[str]) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(jpeg(name))

    return write


def made(name: str, tmp_path: Path, **options) -> Prepared:
    return prepare(name, tmp_path / "out", Options(source=str(tmp_path / "in"), **options))


def records_of(prepared: Prepared, part: str) -> list[Record]:
    return read_records(prepared.folder / f"{part}.jsonl")


def counts(prepared: Prepared, key: str = "records") -> dict[str, int]:
    return {part: number for part, number in prepared.report["split"][key].items() if number}


def test_kvasir_vqa_in_the_layout_of_the_hub(tmp_path, jpeg):
    rows = []
    for number in range(20):
        image = {"bytes": jpeg(number), "path": f"cl{number}.jpg"}
        common = {"image": image, "source": "Polyps"}
        for question, answer in [
            ("How many instrumnets are in the image?", "0"),
            ("What is the size of the polyp?", ">20"),
            ("What is the size of the polyp?", "<5mm"),
        ]:
            rows.append(common | {"question": question, "answer": answer, "img_id": f"cl{number}"})
    rows.append(rows[0] | {"question": "none", "answer": None})
    for number in range(3):
        write_parquet(tmp_path / "in" / "data" / f"{number:05d}.parquet", rows[number * 21 : number * 21 + 21])
    prepared = made("kvasir-vqa", tmp_path)
    assert counts(prepared, "images") == {"train": 14, "val": 3, "test": 3}
    assert prepared.report["rows"]["left_out"] == {
        "no question or no answer": 1,
        "merged into another row's record": 20,
    }
    count, size = records_of(prepared, "val")[:2]
    assert (count.turns[0].question, count.turns[0].answer) == ("How many instruments are in the image?", "0")
    assert count.metadata == {
        "img_id": count.images[0].stem,
        "category": "count",
        "stage": 2,
        "source": "Polyps",
        "original": [{"question": "How many instrumnets are in the image?", "answer": "0"}],
    }
    assert size.metadata["references"] == [">20mm", "<5mm"] and size.turns[0].answer == ">20mm"
    assert [pair["answer"] for pair in size.metadata["original"]] == [">20", "<5mm"]
    assert size.images[0].read_bytes() == jpeg(int(size.images[0].stem[2:]))


URL = "https://huggingface.co/datasets/SimulaMet/Kvasir-VQA-x1/resolve/main/images/{}.jpg"


@pytest.fixture
def x1(tmp_path, write_images) -> None:
    """Ten questions about each of ten images; one question about each of the first six is in the official test."""
    parts: dict[str, list[dict]] = {"train": [], "test": []}
    for image in range(10):
        for number in range(10):
            part = "test" if (number == 9 and image < 6) or image == 9 else "train"
            parts[part].append(
                {
                    "img_id": f"cl{image}",
                    "complexity": 1 + number % 3,
                    "question": f"What is shown ({number})?",
                    "original": json.dumps([{"q": "Is there text?", "a": "no"}]),
                    "answer": "No text is shown.",
                    "question_class": ["text"],
                    "image": URL.format(f"cl{image}"),
                }
            )
    for part, rows in parts.items():
        write_parquet(tmp_path / "in" / "data" / f"{part}-00000-of-00001.parquet", rows, image=pa.string())
    write_images(tmp_path / "in" / "images", [f"cl{image}.jpg" for image in range(10)])


def test_kvasir_vqa_x1_is_split_by_image_and_the_leak_of_the_official_split_is_reported(tmp_path, x1, jpeg):
    prepared = made("kvasir-vqa-x1", tmp_path)
    assert counts(prepared) == {"train": 60, "val": 20, "test": 20}
    assert all(leak["also_in_train"] == 0 for leak in prepared.report["split"]["leaks"].values())
    own = prepared.report["official_split"]
    assert own["records"] == {"train": 84, "val": 0, "test": 16}
    assert own["leaks"]["test"] == {
        "images": 7,
        "also_in_train": 6,
        "share": 0.8571,
        "questions": 16,
        "about_images_in_train": 6,
    }
    record = records_of(prepared, "test")[0]
    assert record.metadata["question_class"] == ["text"] and record.metadata["complexity"] == 1
    assert json.loads(record.metadata["atomic"]) == [{"q": "Is there text?", "a": "no"}]
    assert record.images[0].read_bytes() == jpeg(record.images[0].name)


def test_kvasir_vqa_x1_keeps_the_official_split_on_request_and_reports_its_leak(tmp_path, x1):
    prepared = made("kvasir-vqa-x1", tmp_path, split="official")
    assert counts(prepared) == {"train": 84, "test": 16}
    assert prepared.report["split"]["leaks"]["test"]["share"] == 0.8571
    assert prepared.report["official_split"] is None
    assert {record.metadata["official_split"] for record in records_of(prepared, "test")} == {"test"}


@pytest.mark.parametrize("folder", ["image_weak_augmented/variant_{}", "variant_{}"])
def test_augmented_variants_of_x1_are_in_the_split_of_their_image(tmp_path, x1, folder, jpeg, write_images):
    for variant in (1, 2, 3):
        write_images(tmp_path / "in" / folder.format(variant), [f"cl{image}.jpg" for image in range(9)])
        for image in range(9):
            (tmp_path / "in" / folder.format(variant) / f"cl{image}.jpg").write_bytes(jpeg((variant, image)))
    prepared = made("kvasir-vqa-x1", tmp_path, num_variants=2)
    assert prepared.report["rows"]["of_variants"] == 180 and prepared.report["rows"]["records"] == 280
    sides: dict[str, set[str]] = {}
    for part in ("train", "val", "test"):
        for record in records_of(prepared, part):
            sides.setdefault(record.metadata["img_id"], set()).add(part)
            variant = record.metadata.get("variant")
            image = record.metadata["img_id"]
            expected = jpeg((int(variant), int(image[2:]))) if variant else jpeg(f"{image}.jpg")
            assert record.images[0].read_bytes() == expected
            assert record.images[0].stem == (f"{image}-variant-{variant}" if variant else image)
    assert all(len(found) == 1 for found in sides.values())


def test_missing_variants_are_an_error(tmp_path, x1):
    with pytest.raises(ImageError, match=r"no augmented variant .*searched for image_weak_augmented/variant_\{variant"):
        made("kvasir-vqa-x1", tmp_path, num_variants=1)


@pytest.mark.parametrize("name", ["vqa-rad", "path-vqa"])
def test_datasets_without_image_names_use_keys_as_names(tmp_path, name, jpeg):
    parts = {"train": range(6), "test": range(4, 8)} | ({"validation": range(8, 10)} if name == "path-vqa" else {})
    for part, images in parts.items():
        rows = [
            {"image": {"bytes": jpeg(image), "path": None}, "question": f" what is it ({part})?", "answer": "a lung"}
            for image in images
        ]
        write_parquet(tmp_path / "in" / "data" / f"{part}-00000-of-00001-eb8844.parquet", rows)
    prepared = made(name, tmp_path, split="official")
    assert counts(prepared) == {"train": 6, "test": 4} | ({"val": 2} if name == "path-vqa" else {})
    assert prepared.report["split"]["leaks"]["test"]["share"] == 0.5
    record = records_of(prepared, "train")[0]
    assert record.turns[0].question == "what is it (train)?" and len(record.images[0].stem) == 64


@pytest.mark.parametrize("container", ["zip", "folder"])
def test_slake_has_json_arrays_beside_a_zip_file_or_a_folder(tmp_path, container, jpeg, write_images):
    (tmp_path / "in").mkdir()
    row = {
        "location": "Abdomen",
        "modality": "MRI",
        "answer_type": "OPEN",
        "base_type": "vqa",
        "content_type": "Modality",
        "triple": ["vhead", "_", "_"],
    }
    number = 0
    for part, images in {"train": (0, 1), "validation": (2,), "test": (3,)}.items():
        rows = []
        for image in images:
            for language, question in (("en", "What modality is it?"), ("zh", "这是什么模态？")):
                number += 1
                name = {"img_id": image, "img_name": f"xmlab{image}/source.jpg", "qid": number}
                rows.append(name | {"question": question, "answer": "MRI", "q_lang": language} | row)
        (tmp_path / "in" / f"{part}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    names = [f"imgs/xmlab{image}/source.jpg" for image in range(4)]
    if container == "zip":
        with zipfile.ZipFile(tmp_path / "in" / "imgs.zip", "w") as archive:
            for name in names:
                archive.writestr(name, jpeg(name))
    else:
        write_images(tmp_path / "in", names)
    prepared = made("slake", tmp_path)
    assert counts(prepared) == {"train": 4, "val": 2, "test": 2}
    english, chinese = records_of(prepared, "val")
    assert english.images[0].name == "2.jpg" and english.images[0].read_bytes() == jpeg("imgs/xmlab2/source.jpg")
    assert chinese.turns[0].question == "这是什么模态？"
    assert english.metadata == {
        "img_id": "2",
        "official_split": "val",
        "language": "en",
        "category": "Modality",
        "qid": 5,
        **{key: value for key, value in row.items() if key != "content_type"},
    }


def test_endovis18_vqa_has_text_files_and_is_split_by_video(tmp_path, jpeg, write_images):
    for sequence in (1, 2, 10):
        for frame in range(3):
            folder = tmp_path / "in" / f"seq_{sequence}"
            write_images(folder / "left_frames", [f"frame{frame:03d}.png"])
            (folder / "left_frames" / f"frame{frame:03d}.png").write_bytes(jpeg((sequence, frame)))
            path = folder / "vqa" / "Classification" / f"frame{frame:03d}_QA.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("What organ is being operated?|kidney\nWhat is the state of prograsp_forceps?|Idle\n\n")
            (folder / "vqa" / "Sentence").mkdir(exist_ok=True)
            (folder / "vqa" / "Sentence" / path.name).write_text("not read|at all\n")
    prepared = made("endovis18-vqa", tmp_path)
    assert counts(prepared) == {"train": 12, "val": 6}
    records = records_of(prepared, "train")
    assert [record.metadata["sequence"] for record in records] == ["2"] * 6 + ["10"] * 6
    assert records[0].metadata["img_id"] == "seq_2_frame000"
    assert records[1].turns[0].answer == "Idle"
    assert records[0].images[0].read_bytes() == jpeg((2, 0))
    drawn = prepare("endovis18-vqa", tmp_path / "drawn", Options(source=str(tmp_path / "in"), split="image"))
    sides = Counter((record.metadata["sequence"], part) for part in counts(drawn) for record in records_of(drawn, part))
    assert len(sides) == len({sequence for sequence, _ in sides}) == 3


def test_a_dataset_that_is_not_on_the_hub_is_refused_with_its_homepage(tmp_path):
    with pytest.raises(SourceError, match="is not on the Hub: get it from https://github.com.*--source DIR"):
        prepare("endovis18-vqa", tmp_path / "out")
