"""Every file format of a source gives the same records; images are found beside them."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from support.rows import files_in, write_lines, write_parquet

from lookonce.datasets.prepare.definition import find_definition
from lookonce.datasets.prepare.run import Options, Prepared, prepare
from lookonce.datasets.prepare.sources import find_source
from lookonce.datasets.records import read_records
from lookonce.errors import ImageError, RecordsError, SourceError, UsageError

IMAGES = {f"cl{number}": b"\xff\xd8\xff\xe0" + bytes([number]) * (1000 + number) for number in range(10)}
ROWS = [
    {"img_id": name, "source": "Polyps", "question": question, "answer": answer}
    for number, name in enumerate(IMAGES)
    for question, answer in [
        ("How many instrumnets are in the image?", "1"),
        ("Where in the image is the instrument?", "lower-rigth;center"),
        *[("What type of polyp is present?", answer) for answer in ("paris ip", "paris is")[number % 3 :]],
        *([("none", "nan")] if number == 4 else []),
    ]
]


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, data in IMAGES.items():
        (folder / f"{name}.jpg").write_bytes(data)


def in_parquet(folder: Path, **options) -> None:
    rows = [{"image": {"bytes": IMAGES[row["img_id"]], "path": None}} | row for row in ROWS]
    for number in range(3):
        some = rows[number * len(rows) // 3 : (number + 1) * len(rows) // 3]
        write_parquet(folder / "data" / f"{number:05d}.parquet", some, **options)


def in_plain_binary(folder: Path) -> None:
    rows = [{"image": IMAGES[row["img_id"]]} | row for row in ROWS]
    write_parquet(folder / "raw.parquet", rows, {"image": pa.binary()}, compression="zstd", row_group_size=7)


def in_csv(folder: Path) -> None:
    write_images(folder / "images")
    with (folder / "metadata.csv").open("w", newline="", encoding="utf-8-sig") as file:
        lines = csv.DictWriter(file, ["source", "question", "answer", "img_id"])
        lines.writeheader()
        lines.writerows(ROWS)


def flat(row: dict[str, str]) -> dict[str, str]:
    """A row in flat format."""
    rest = {key: row[key] for key in ("question", "answer", "source")}
    return {"image_id": row["img_id"], "image_filename": f"{row['img_id']}.jpg"} | rest


FLAT = [flat(row) for row in ROWS]


def in_jsonl(folder: Path) -> None:
    write_images(folder / "images")
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in FLAT))


def in_json(folder: Path) -> None:
    write_images(folder / "images")
    (folder / "all.json").write_text(json.dumps(FLAT, indent=1))
    (folder / "report.json").write_text("{}")  # which holds no rows


def in_tar_of_images(folder: Path) -> None:
    rows = [row | {"image_filename": f"frames.tar/{row['image_filename']}"} for row in FLAT]
    write_lines(folder / "all.jsonl", *rows)
    with tarfile.open(folder / "frames.tar", "w") as archive:
        for name, data in IMAGES.items():
            member = tarfile.TarInfo(f"{name}.jpg")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


LAYOUTS: dict[str, Callable[[Path], None]] = {
    "parquet": in_parquet,
    "parquet, dictionary": lambda folder: in_parquet(folder, dictionary_pagesize_limit=1 << 30, row_group_size=4),
    "parquet, plain binary": in_plain_binary,
    "CSV": in_csv,
    "JSONL": in_jsonl,
    "JSON": in_json,
    "JSONL into a tar": in_tar_of_images,
}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """The folder of a source that has only images yet."""
    write_images(tmp_path / "in" / "images")
    return tmp_path / "in"


def content(prepared: Prepared) -> dict[str, bytes]:
    """All files but the report."""
    return {name: data for name, data in files_in(prepared.folder).items() if name != "report.json"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("expected")
    in_parquet(folder / "in")
    return content(prepare("kvasir-vqa", folder / "out", Options(str(folder / "in"))))


@pytest.mark.guarantee("All sources of a dataset give the same records.")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_file_formats_give_the_same_records_and_image_files(tmp_path, made, layout, expected):
    LAYOUTS[layout](tmp_path / "in")
    prepared = made(source=tmp_path / "in")
    assert content(prepared) == expected and prepared.report["rows"]["read"] == len(ROWS)
    assert sorted(data for name, data in expected.items() if "images" in name) == sorted(IMAGES.values())


def test_a_source_may_be_one_file_with_images_elsewhere(tmp_path, made, expected):
    in_jsonl(tmp_path / "in")
    (tmp_path / "in" / "images").rename(tmp_path / "frames")
    assert content(made(source=tmp_path / "in" / "all.jsonl", image_root=tmp_path / "frames")) == expected


def test_of_several_formats_in_a_folder_one_is_read_and_the_others_are_named(tmp_path):
    in_csv(tmp_path / "in")
    write_lines(tmp_path / "in" / "some.jsonl", *FLAT[:3])
    notes: list[str] = []
    found = prepare("kvasir-vqa", tmp_path / "a", Options(source=str(tmp_path / "in")), notes.append)
    assert found.report["rows"]["read"] == len(ROWS)
    assert "reading 1 csv file; ignored: some.jsonl (--source may name a file)" in notes
    found = prepare("kvasir-vqa", tmp_path / "b", Options(source=str(tmp_path / "in" / "some.jsonl")))
    assert found.report["rows"]["read"] == 3


@pytest.mark.parametrize(
    "names", ["train-00000-of-2 train-00001-of-2 val test", "train/0 validation/0 test/0", "set-train set-dev set-test"]
)
def test_file_names_say_the_official_split(made, images, names):
    for number, name in enumerate(names.split()):
        write_lines(images / f"{name}.jsonl", FLAT[5 * number])
    prepared = made(source=images, split="official")
    assert [path.stem for path in sorted(prepared.folder.glob("*.jsonl"))] == ["test", "train", "val"]
    assert prepared.report["split"]["by"] == "the set itself"


def test_a_split_column_takes_precedence_over_file_names(made, images):
    write_lines(images / "train.jsonl", FLAT[0] | {"split": "test"}, FLAT[5])
    [record] = read_records(made(source=images, split="official").folder / "test.jsonl")
    assert record.metadata["img_id"] == "cl0" and record.metadata["official_split"] == "test"


def test_files_are_read_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 1):
        (tmp_path / f"rows_{number}.csv").write_text("question,answer\n")
    assert [*find_source(tmp_path, find_definition("kvasir-vqa")).files] == ["rows_1.csv", "rows_9.csv", "rows_10.csv"]


def test_rows_without_their_image_are_left_out_counted_and_named(tmp_path, made):
    in_csv(tmp_path / "in")
    (tmp_path / "in" / "images" / "cl3.jpg").unlink()
    missing = sum(row["img_id"] == "cl3" for row in ROWS)
    report = made(source=tmp_path / "in").report
    assert report["rows"]["left_out"]["no image"] == missing
    assert report["images"]["not_found"] == {"no image was found: cl3": missing}


def test_without_any_image_the_error_names_the_searched_paths_and_an_image_root_must_be_a_folder(tmp_path, made):
    in_csv(tmp_path / "in")
    (tmp_path / "in" / "images").rename(tmp_path / "elsewhere")
    searched = r"(?s)no row has an image; .*searched for .*images/\{image_id\}.jpg.*--image-root"
    with pytest.raises(ImageError, match=searched):
        made(source=tmp_path / "in")
    with pytest.raises(UsageError, match="--image-root .*gone is not a folder"):
        made("other", tmp_path / "in", image_root=tmp_path / "gone")


@pytest.fixture
def prepared_own(tmp_path):
    """Prepares rows in a folder `in` by a definition of one's own, with further keys, into a folder."""

    def prepared_own(text="", name="out", **options):
        (tmp_path / "own.yaml").write_text(f"name: own\n{text}")
        return prepare(str(tmp_path / "own.yaml"), tmp_path / name, Options(str(tmp_path / "in"), **options))

    return prepared_own


def test_a_row_has_the_image_beside_its_own_file(tmp_path, prepared_own):
    for part, picture in (("train", b"\xff\xd8\xff1"), ("test", b"\xff\xd8\xff2")):
        write_lines(tmp_path / "in" / part / "metadata.jsonl", {"file_name": "0.jpg", "question": "q", "answer": part})
        (tmp_path / "in" / part / "0.jpg").write_bytes(picture)
    folder = prepared_own("split: {by: official}").folder
    for part, picture in (("train", b"\xff\xd8\xff1"), ("test", b"\xff\xd8\xff2")):
        [record] = read_records(folder / f"{part}.jsonl")
        assert record.images[0].read_bytes() == picture


@pytest.mark.guarantee("All sources of a dataset give the same records.")
def test_cells_that_a_spreadsheet_would_take_for_formulas_have_their_text(tmp_path, prepared_own):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.jpg").write_bytes(IMAGES["cl0"])
    (tmp_path / "in" / "rows.csv").write_text("image,question,answer\n0.jpg,'= how large?,'-5 mm\n")
    [record] = read_records(prepared_own().folder / "train.jsonl")
    assert [(turn.question, turn.answer) for turn in record.turns] == [("= how large?", "-5 mm")]


@pytest.mark.parametrize("key", ["question", "answer"])
@pytest.mark.parametrize("value", [["yes", "no"], {"a": 1}])
def test_a_list_or_an_object_is_no_text(tmp_path, prepared_own, key, value):
    write_lines(tmp_path / "in" / "rows.jsonl", {"image": "0.jpg", "question": "q", "answer": "a"} | {key: value})
    with pytest.raises(RecordsError, match=rf"rows.jsonl:1: the {key} must be a text, got .*; write a row for each"):
        prepared_own()


def test_metadata_without_a_json_type_become_texts(tmp_path, prepared_own):
    row = {"image": {"bytes": IMAGES["cl0"], "path": None}, "question": "q", "answer": "a"}
    taken = datetime(2026, 11, 26, 12, 30)
    write_parquet(tmp_path / "in" / "rows.parquet", [row | {"taken": taken}], {"taken": pa.timestamp("s")})
    [record] = read_records(prepared_own("columns: {metadata: {taken: taken}}").folder / "train.jsonl")
    assert record.metadata["taken"] == "2026-11-26 12:30:00"


@pytest.mark.parametrize("name", ["胃" * 99, "a" * 300])
def test_a_long_name_of_an_image_is_cut(tmp_path, prepared_own, name):
    row = {"image": {"bytes": IMAGES["cl0"], "path": None}, "question": "q", "answer": "a", "image_id": name}
    write_parquet(tmp_path / "in" / "rows.parquet", [row])
    [path] = (prepared_own().folder / "images").iterdir()
    assert name.startswith(path.stem) and path.suffix == ".jpg" and 190 < len(path.name.encode()) < 240


def test_rows_stay_together_by_metadata_that_they_have(tmp_path, prepared_own):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.jpg").write_bytes(IMAGES["cl0"])
    write_lines(tmp_path / "in" / "rows.jsonl", {"image": "0.jpg", "question": "q", "answer": "a", "patient": 1})
    with pytest.raises(UsageError, match="no column is kept as patient; add it, as in columns: {metadata: {patient"):
        prepared_own("split: {together: [patient]}")
    with pytest.raises(UsageError, match="no row has a patient; expected a column `patientid`"):
        prepared_own("split: {together: [patient]}\ncolumns: {metadata: {patient: patientid}}")
    prepared_own("split: {together: [patient]}\ncolumns: {metadata: {patient: patient}}")


@pytest.mark.parametrize("name", ["../secret.jpg", "/etc/hostname", "images/../../secret.jpg", "a\0b.jpg"])
def test_a_name_that_leads_out_of_the_source_is_not_opened(tmp_path, made, images, name):
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    write_lines(images / "a.jsonl", FLAT[0], {"image_filename": name, "question": "a", "answer": "b"})
    report = made(source=images).report
    assert report["rows"]["left_out"] == {"no image": 1} and report["images"]["written"] == 1


def test_an_unreadable_image_is_counted_with_the_reason(tmp_path, made):
    (tmp_path / "in").mkdir()
    in_tar_of_images(tmp_path / "in")
    path = tmp_path / "in" / "frames.tar"
    path.write_bytes(path.read_bytes()[:-12_000])
    reasons = made(source=tmp_path / "in").report["images"]["not_found"]
    assert reasons and all("cannot read image" in reason and ": cl" in reason for reason in reasons)


BROKEN = {
    "cut parquet": ("a.parquet", b"PAR1 and no end", "a.parquet cannot be read"),
    "JSON of numbers": ("a.json", b"[1, 2]", "a.json: record 1: expected a JSON object, got int"),
    "other columns": ("a.jsonl", b'{"q": "a", "answer": "b"}\n', "a.jsonl:1: expected a column `question`, got"),
    "no answer": ("a.jsonl", b'{"question": "a"}\n', "name it in the dataset's YAML file: columns: {answer"),
}


@pytest.mark.parametrize(("name", "data", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_named_with_the_line(tmp_path, made, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RecordsError) as refusal:
        made(source=tmp_path)
    assert message in str(refusal.value)


def test_a_path_without_rows_is_refused(tmp_path, made):
    (tmp_path / "a.txt").write_text("x")
    for name, message in (("gone", "nothing exists at"), (".", "has no parquet, CSV, JSONL"), ("a.txt", "has no par")):
        with pytest.raises(SourceError, match=message):
            made(source=tmp_path / name)
