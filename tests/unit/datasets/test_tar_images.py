"""A pack holds every image once, byte for byte, in tars that webdataset reads, and is never half a pack."""

from __future__ import annotations

import errno
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import webdataset
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lookonce.cli import main
from lookonce.datasets import tar_images as pack_module
from lookonce.datasets import tars as tars_module
from lookonce.datasets.audit.pictures import Picture
from lookonce.datasets.images import index_images, read_bytes
from lookonce.datasets.records import read_records
from lookonce.datasets.tar_images import pack
from lookonce.datasets.tars import Tar, extension, plan_tars, tar_size
from lookonce.errors import DiskFull, ImageError, UsageError
from lookonce.files import TEMPORARY_MARK

SPLITS = ("train", "val", "test")
TAR_BYTES = 300_000
"""Seven tars of the sample's images."""

LEAVES_FILES_OPEN = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
"""webdataset's reader does."""


@pytest.fixture(scope="module")
def packed(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample's three splits; not to be written to."""
    folder = tmp_path_factory.mktemp("packs") / "packed"
    pack([sample / f"{split}.jsonl" for split in SPLITS], folder, tar_bytes=TAR_BYTES)
    return folder


def records(folder: Path) -> list[Any]:
    return [record for split in SPLITS for record in read_records(folder / f"{split}.jsonl")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def samples(*tars: Path) -> list[dict[str, Any]]:
    return list(webdataset.WebDataset([str(tar) for tar in tars], shardshuffle=False))


def test_records_say_the_same_about_the_same_bytes(sample: Path, packed: Path):
    before, after = records(sample), records(packed)
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert (one.turns, one.system, one.metadata) == (other.turns, other.system, other.metadata)
    paths = {one.images[0]: other.images[0] for one, other in zip(before, after, strict=True)}
    assert all(read_bytes(one) == read_bytes(other) for one, other in list(paths.items())[::6])


def test_images_are_indexed_as_in_the_folder_they_came_from(sample: Path, packed: Path):
    before, after = index_images(records(sample)), index_images(records(packed))
    assert list(after.path_of) == list(before.path_of) and after.size_of == before.size_of
    assert after.num_files == after.num_distinct == before.num_distinct < before.num_files


@LEAVES_FILES_OPEN
def test_webdataset_reads_one_sample_an_image(packed: Path):
    tars = sorted(packed.glob("*.tar"))
    found = samples(*tars)
    assert len(tars) > 3 and len(found) == len({one["__key__"] for one in found}) == 64
    assert all({name for name in one if not name.startswith("__")} == {"jpg"} for one in found)
    assert all("." not in one["__key__"] for one in found)


def test_the_same_input_gives_the_same_bytes(sample: Path, packed: Path, tmp_path: Path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(sample / "images", copy / "images", copy_function=shutil.copyfile)
    for split in SPLITS:
        shutil.copyfile(sample / f"{split}.jsonl", copy / f"{split}.jsonl")
    pack([copy / f"{split}.jsonl" for split in SPLITS], tmp_path / "again", tar_bytes=TAR_BYTES)
    assert contents(tmp_path / "again") == contents(packed)


def test_the_list_of_images_leads_to_each_one_and_names_its_files(sample: Path, packed: Path):
    lines = [json.loads(line) for line in (packed / "images.ndjson").read_text().splitlines()]
    assert len(lines) == 64
    for line in lines:
        data = read_bytes(packed / line["image"])
        assert len(data) == line["bytes"] and all(read_bytes(sample / name) == data for name in line["files"])
    assert sorted(len(line["files"]) for line in lines)[-3:] == [1, 2, 2]


@LEAVES_FILES_OPEN
def test_questions_lie_beside_their_image_if_asked_for(sample: Path, tmp_path: Path):
    pack([sample / "val.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES, with_questions=True)
    by_key: dict[str, list[tuple[str, str]]] = {}
    index = index_images(read_records(sample / "val.jsonl"))
    for record in read_records(sample / "val.jsonl"):
        by_key.setdefault(index.key_of[record.images[0]], []).append((record.turns[0].question, record.turns[0].answer))
    found = samples(*sorted((tmp_path / "packed").glob("*.tar")))
    assert len(found) == len(by_key)
    for one in found:
        asked = json.loads(one["json"])["val.jsonl"]
        assert [(each["question"], each["answer"]) for each in asked] == by_key[one["__key__"]]


def test_an_archive_is_packed_as_a_folder_is(packed: Path, tmp_path: Path):
    again = tmp_path / "again"
    pack([packed / f"{split}.jsonl" for split in SPLITS], again, tar_bytes=TAR_BYTES)
    assert {path.name: path.read_bytes() for path in again.glob("*.tar")} == {
        path.name: path.read_bytes() for path in packed.glob("*.tar")
    }


class Killed(BaseException):
    pass


def test_an_interrupted_pack_has_whole_tars_only_and_goes_on(sample: Path, packed: Path, tmp_path: Path, monkeypatch):
    paths, folder = [sample / f"{split}.jsonl" for split in SPLITS], tmp_path / "packed"
    read, num_read = tars_module.read_many, []

    def interrupted(wanted):
        for item in read(wanted):
            num_read.append(item)
            if len(num_read) == 30:
                raise Killed
            yield item

    monkeypatch.setattr(tars_module, "read_many", interrupted)
    with pytest.raises(Killed):
        pack(paths, folder, tar_bytes=TAR_BYTES)
    whole = contents(packed)
    there = contents(folder)
    assert there.keys() < whole.keys() and "images-00000.tar" in there and not list(folder.glob(f"*{TEMPORARY_MARK}*"))
    assert all(whole[name] == content for name, content in there.items())
    report = pack(paths, folder, tar_bytes=TAR_BYTES)
    assert contents(folder) == whole and report.num_kept == len(there) - 1


def test_packing_again_changes_nothing(packed: Path, sample: Path):
    before = {path: path.stat().st_mtime_ns for path in packed.glob("*.tar")}
    report = pack([sample / f"{split}.jsonl" for split in SPLITS], packed, tar_bytes=TAR_BYTES)
    assert before == {path: path.stat().st_mtime_ns for path in packed.glob("*.tar")}
    assert report.num_kept == len(report.tars) == len(before)


def break_it(folder: Path) -> None:
    (folder / "images" / "frame-0003.jpg").write_bytes(b"no image")
    (folder / "images" / "frame-0004.jpg").unlink()


@pytest.fixture
def own(sample: Path, tmp_path: Path) -> Path:
    """A copy of the sample's records and images."""
    shutil.copytree(sample / "images", tmp_path / "own" / "images")
    for split in SPLITS:
        shutil.copyfile(sample / f"{split}.jsonl", tmp_path / "own" / f"{split}.jsonl")
    return tmp_path / "own"


def test_images_that_can_not_be_packed_are_named_and_nothing_is_written(own: Path, tmp_path: Path):
    break_it(own)
    with pytest.raises(ImageError, match=r"2 of 66 images can not be packed(.|\n)*jsonl:\d+(.|\n)*--skip-missing"):
        pack([own / f"{split}.jsonl" for split in SPLITS], tmp_path / "packed", tar_bytes=TAR_BYTES)
    assert not (tmp_path / "packed").exists()


def test_records_without_their_images_are_left_out_and_counted(own: Path, tmp_path: Path):
    break_it(own)
    paths = [own / f"{split}.jsonl" for split in SPLITS]
    report = pack(paths, tmp_path / "packed", tar_bytes=TAR_BYTES, skip_missing=True)
    broken = {"frame-0003.jpg", "frame-0004.jpg"}
    lost = [record for record in records(own) if record.images[0].name in broken]
    assert lost and sum(report.left_out.values()) == len(lost)
    assert len(records(tmp_path / "packed")) == sum(report.records.values()) == len(records(own)) - len(lost)


def test_a_file_that_would_have_no_records_left_is_refused(own: Path, tmp_path: Path):
    shutil.rmtree(own / "images")
    with pytest.raises(ImageError, match="a file would have no records left"):
        pack([own / "val.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES, skip_missing=True)
    assert not (tmp_path / "packed").exists()


def test_an_image_that_changes_meanwhile_is_an_error(own: Path, tmp_path: Path, monkeypatch):
    read = tars_module.read_many
    monkeypatch.setattr(tars_module, "read_many", lambda paths: ((path, data + b"x") for path, data in read(paths)))
    with pytest.raises(ImageError, match="changed while it was packed"):
        pack([own / "val.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES)
    assert not list((tmp_path / "packed").glob("*.tar"))


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda own, folder: (folder.mkdir(), (folder / "mine.txt").touch()), "is not empty"),
        (lambda own, folder: folder.write_text("x"), "is a file"),
        (lambda own, folder: pack([own / "test.jsonl"], folder, tar_bytes=TAR_BYTES), "pack of other images"),
        (lambda own, folder: pack([own / "val.jsonl"], folder, tar_bytes=TAR_BYTES // 3), "tars of another size"),
    ],
)
def test_what_else_is_in_the_folder_is_left_alone(own: Path, tmp_path: Path, prepare: Callable[..., Any], message: str):
    folder = tmp_path / "packed"
    prepare(own, folder)
    before = contents(folder) if folder.is_dir() else folder.read_bytes()
    with pytest.raises(UsageError, match=message):
        pack([own / "val.jsonl"], folder, tar_bytes=TAR_BYTES)
    assert before == (contents(folder) if folder.is_dir() else folder.read_bytes())


def test_other_records_are_not_overwritten(own: Path, tmp_path: Path):
    pack([own / "val.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES)
    before = contents(tmp_path / "packed")
    lines = (own / "val.jsonl").read_text().splitlines(keepends=True)
    (own / "val.jsonl").write_text("".join(reversed(lines)))
    with pytest.raises(UsageError, match=r"val\.jsonl holds other records"):
        pack([own / "val.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES)
    assert contents(tmp_path / "packed") == before


def test_records_files_that_would_get_one_name_are_refused(own: Path, tmp_path: Path):
    paths = [own / name for name in ("a/train.jsonl", "b/train.jsonl")]
    for path in paths:
        path.parent.mkdir()
        path.write_text((own / "val.jsonl").read_text().replace("images/", "../images/"))
    with pytest.raises(UsageError, match="rename it"):
        pack(paths, tmp_path / "packed", own, tar_bytes=TAR_BYTES)


def test_room_is_asked_for_before_anything_is_written(own: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(DiskFull, match="are missing"):
        pack([own / "val.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES)
    assert not (tmp_path / "packed").exists()


def test_a_disk_that_runs_full_keeps_what_is_finished(own: Path, tmp_path: Path, monkeypatch):
    read, num_read = tars_module.read_many, []

    def until_full(paths):
        for item in read(paths):
            num_read.append(item)
            if len(num_read) == 6:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield item

    monkeypatch.setattr(tars_module, "read_many", until_full)
    with pytest.raises(DiskFull, match="what is finished is kept"):
        pack([own / "val.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES // 3)
    assert {path.name for path in (tmp_path / "packed").iterdir()} >= {"images.ndjson", "images-00000.tar"}
    assert not list((tmp_path / "packed").glob(f"*{TEMPORARY_MARK}*"))
    pack([own / "val.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES // 3)
    assert len(read_records(tmp_path / "packed" / "val.jsonl")) == len(read_records(own / "val.jsonl"))


def test_images_are_named_by_what_they_are(tmp_path: Path):
    for name, kind in (("a.jpg", "PNG"), ("b", "JPEG"), ("c.d.e.jpeg", "JPEG"), ("f.tiff", "TIFF")):
        Image.new("RGB", (40, 40), (len(name), 0, 0)).save(tmp_path / name, kind)
    lines = [
        {"image_filename": path.name, "question": "Is it?", "answer": "yes"} for path in sorted(tmp_path.iterdir())
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pack([tmp_path / "all.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES)
    found = [record.images[0].suffix for record in read_records(tmp_path / "packed" / "all.jsonl")]
    assert found == [".png", ".jpg", ".jpg", ".tif"]


def test_text_only_records_are_kept(tmp_path: Path):
    line = {"images": [], "turns": [{"question": "What is a polyp?", "answer": "a growth"}]}
    (tmp_path / "text.jsonl").write_text(json.dumps(line))
    report = pack([tmp_path / "text.jsonl"], tmp_path / "packed", tar_bytes=TAR_BYTES)
    assert report.tars == () and read_records(tmp_path / "packed" / "text.jsonl")[0].turns[0].answer == "a growth"


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 900))
def test_tars_hold_every_image_in_order_and_no_more_than_asked(sizes, tar_bytes):
    pictures = [Picture(Path(str(number)), f"{number:064x}", num) for number, num in enumerate(sizes)]
    tars = plan_tars(pictures, tar_bytes)
    assert [picture for tar in tars for picture in tar.pictures] == pictures
    assert all(len(tar.pictures) == 1 or sum(p.num_bytes for p in tar.pictures) <= tar_bytes for tar in tars)
    assert len({tar.name for tar in tars}) == len(tars)


def test_the_size_of_a_tar_is_known_before_it_is_written(packed: Path):
    for path in packed.glob("*.tar"):
        with tarfile.open(path) as tar:
            pictures = tuple(Picture(Path(member.name), member.name, member.size) for member in tar)
        assert tar_size(Tar(path.name, pictures), {}) == path.stat().st_size


@pytest.mark.parametrize(("kind", "expected"), [("JPEG", "jpg"), ("MPO", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_extensions_are_those_that_loaders_know(kind, expected):
    assert extension(Picture(Path("a"), format=kind)) == expected


def test_the_command_packs_and_reports(sample: Path, tmp_path: Path):
    def run(*words: object) -> Any:
        return CliRunner().invoke(main, ["data", "pack", *map(str, words)])

    result = run(sample / "train.jsonl", sample / "val.jsonl", tmp_path / "packed", "--tar-mb", 1)
    assert result.exit_code == 0 and "train.jsonl" in result.stdout and "images" in result.stdout
    value = json.loads(
        run(sample / "train.jsonl", sample / "val.jsonl", tmp_path / "packed", "--tar-mb", 1, "--json").stdout
    )
    assert value["num_kept"] == len(value["tars"]) and value["records"].keys() == {"train.jsonl", "val.jsonl"}
