"""Tar shards: planned, written, read."""

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
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.rows import files_in, run, write_lines
from webdataset import TarWriter

from lookonce.datasets import tar_shards
from lookonce.datasets.archives import has_json, read_samples, read_tar_members
from lookonce.datasets.formats.image_references import suffix_of_format
from lookonce.datasets.images import ImageInfo, index_images, read_bytes
from lookonce.datasets.records import read_records
from lookonce.datasets.tar_shards import TarShard, plan_tar_shards, tar_size, write_tar_shards
from lookonce.errors import DiskFull, ImageError, UsageError
from lookonce.files import TEMPORARY_MARK

SPLITS = ("train", "val", "test")
TAR_BYTES = 300_000
"""Gives seven tar shards of the sample's images."""


@pytest.fixture(scope="module")
def shards(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tar shards of the sample's three splits. Tests must not write to them."""
    folder = tmp_path_factory.mktemp("tars") / "tars"
    write_tar_shards(paths_in(sample), folder, tar_bytes=TAR_BYTES)
    return folder


def test_suffixes_follow_the_image_format_and_not_the_file_name(tmp_path):
    for name, kind in (("a.jpg", "PNG"), ("b", "JPEG"), ("c.d.e.jpeg", "JPEG"), ("f.tiff", "TIFF")):
        Image.new("RGB", (40, 40), (len(name), 0, 0)).save(tmp_path / name, kind)
    lines = [{"image": path.name, "question": "Is it?", "answer": "yes"} for path in sorted(tmp_path.iterdir())]
    write_tar_shards([write_lines(tmp_path / "all.jsonl", *lines)], tmp_path / "tars", tar_bytes=TAR_BYTES)
    found = [record.images[0].suffix for record in read_records(tmp_path / "tars" / "all.jsonl")]
    assert found == [".png", ".jpg", ".jpg", ".tif"]


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 900))
def test_tar_shards_hold_every_image_in_order_within_the_size(sizes, tar_bytes):
    images = [ImageInfo(Path(str(number)), f"{number:064x}", num) for number, num in enumerate(sizes)]
    shards = plan_tar_shards(images, tar_bytes)
    assert [image for shard in shards for image in shard.images] == images
    assert all(len(shard.images) == 1 or sum(i.num_bytes for i in shard.images) <= tar_bytes for shard in shards)
    assert len({shard.name for shard in shards}) == len(shards)


def test_the_size_of_a_tar_shard_is_known_in_advance(shards):
    for path in shards.glob("*.tar"):
        with tarfile.open(path) as tar:
            images = tuple(ImageInfo(Path(member.name), member.name, member.size) for member in tar)
        assert tar_size(TarShard(path.name, images), {}) == path.stat().st_size


@pytest.mark.parametrize(
    ("format", "expected"), [("JPEG", ".jpg"), ("MPO", ".jpg"), ("PNG", ".png"), ("WEBP", ".webp"), ("TIFF", ".tif")]
)
def test_extensions_are_those_that_loaders_know(format, expected):
    image = ImageInfo(Path("a"), key="key", format=format)
    assert TarShard("a.tar", (image,)).member(image) == f"a.tar/key{expected}" == f"a.tar/key{suffix_of_format(format)}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        for key in ("x/1", "x/2"):
            writer.write({"__key__": key, "jpg": key.encode(), "json": {"question": key}})
    return tmp_path / "a.tar"


def test_members_are_read_in_order_or_by_name(path):
    assert [name for name, _ in read_tar_members(path)] == ["x/1.jpg", "x/1.json", "x/2.jpg", "x/2.json"]
    assert list(read_tar_members(path, lambda name: name == "x/2.jpg")) == [("x/2.jpg", b"x/2")]


def test_samples_group_members_by_key(path):
    first, second = read_samples(path, "a.tar")
    assert (first["__key__"], first["__url__"], first["jpg"]) == ("x/1", "a.tar", b"x/1")
    assert second["json"] == b'{"question": "x/2"}'


def test_a_tar_has_json_if_its_first_members_say_so_or_it_is_damaged(path, tmp_path):
    with TarWriter(str(tmp_path / "images.tar")) as writer:
        writer.write({"__key__": "a", "jpg": b"x"})
    (tmp_path / "damaged.tar").write_bytes(b"x" * 2000)
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    found = {name: has_json(tmp_path / name) for name in ("a.tar", "images.tar", "damaged.tar", "empty.tar")}
    assert found == {"a.tar": True, "images.tar": False, "damaged.tar": True, "empty.tar": False}


LEAVES_FILES_OPEN = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
"""The reader of webdataset does not close files."""


def records(folder: Path) -> list[Any]:
    return [record for path in paths_in(folder) for record in read_records(path)]


def paths_in(folder: Path) -> list[Path]:
    return [folder / f"{split}.jsonl" for split in SPLITS]


def samples(*tars: Path) -> list[dict[str, Any]]:
    return list(webdataset.WebDataset([str(tar) for tar in tars], shardshuffle=False))


def test_records_have_the_same_texts_about_the_same_bytes(sample, shards):
    before, after = records(sample), records(shards)
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert (one.turns, one.system, one.metadata) == (other.turns, other.system, other.metadata)
    paths = {one.images[0]: other.images[0] for one, other in zip(before, after, strict=True)}
    assert all(read_bytes(one) == read_bytes(other) for one, other in list(paths.items())[::6])


@pytest.mark.guarantee("Images written to tar shards keep their bytes, and the order in which caches are planned.")
def test_images_are_indexed_as_in_the_folder_they_came_from(sample, shards):
    before, after = index_images(records(sample)), index_images(records(shards))
    assert list(after.path_of) == list(before.path_of) and after.size_of == before.size_of
    assert after.num_files == after.num_distinct == before.num_distinct < before.num_files


@LEAVES_FILES_OPEN
def test_webdataset_reads_one_sample_per_image(shards):
    tars = sorted(shards.glob("*.tar"))
    found = samples(*tars)
    assert len(tars) > 3 and len(found) == len({one["__key__"] for one in found}) == 64
    assert all({name for name in one if not name.startswith("__")} == {"jpg"} for one in found)
    assert all("." not in one["__key__"] for one in found)


def test_the_same_input_gives_the_same_bytes(own, shards, tmp_path):
    write_tar_shards(paths_in(own), tmp_path / "again", tar_bytes=TAR_BYTES)
    assert files_in(tmp_path / "again") == files_in(shards)


def test_the_index_leads_to_each_image_and_names_its_files(sample, shards):
    lines = [json.loads(line) for line in (shards / "images.ndjson").read_text().splitlines()]
    assert len(lines) == 64
    for line in lines:
        data = read_bytes(shards / line["image"])
        assert len(data) == line["bytes"] and all(read_bytes(sample / name) == data for name in line["files"])
    assert sorted(len(line["files"]) for line in lines)[-3:] == [1, 2, 2]


@LEAVES_FILES_OPEN
def test_questions_are_written_beside_their_image_on_request(sample, tmp_path):
    write_tar_shards([sample / "val.jsonl"], tmp_path / "tars", tar_bytes=TAR_BYTES, with_questions=True)
    by_key: dict[str, list[tuple[str, str]]] = {}
    index = index_images(read_records(sample / "val.jsonl"))
    for record in read_records(sample / "val.jsonl"):
        by_key.setdefault(index.key_of[record.images[0]], []).append((record.turns[0].question, record.turns[0].answer))
    found = samples(*sorted((tmp_path / "tars").glob("*.tar")))
    assert len(found) == len(by_key)
    for one in found:
        asked = json.loads(one["json"])["val.jsonl"]
        assert [(each["question"], each["answer"]) for each in asked] == by_key[one["__key__"]]


def test_tar_shards_of_tar_shards_are_the_same(shards, tmp_path):
    write_tar_shards(paths_in(shards), tmp_path, tar_bytes=TAR_BYTES)
    one, other = ({path.name: path.read_bytes() for path in folder.glob("*.tar")} for folder in (tmp_path, shards))
    assert one == other


def test_records_files_in_any_order_keep_their_names(sample, tmp_path):
    write_tar_shards([sample / "val.jsonl", sample / "train.jsonl"], tmp_path / "tars", tar_bytes=TAR_BYTES)
    for name in ("train.jsonl", "val.jsonl"):
        asked = [[record.turns for record in read_records(folder / name)] for folder in (sample, tmp_path / "tars")]
        assert asked[0] == asked[1]


def stop_after(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Raise the error once, when this many images have been read."""
    read, num_read = tar_shards.read_many, []

    def stopped(paths: Any) -> Any:
        for item in read(paths):
            num_read.append(item)
            if len(num_read) == number:
                raise error
            yield item

    monkeypatch.setattr(tar_shards, "read_many", stopped)


class Killed(BaseException):
    pass


def test_an_interrupted_run_has_only_complete_tar_shards_and_resumes(sample, shards, tmp_path, monkeypatch):
    folder, whole = tmp_path / "tars", files_in(shards)
    stop_after(monkeypatch, 30, Killed())
    with pytest.raises(Killed):
        write_tar_shards(paths_in(sample), folder, tar_bytes=TAR_BYTES)
    there = files_in(folder)
    assert there.items() < whole.items() and "images-00000.tar" in there and TEMPORARY_MARK not in "".join(there)
    report = write_tar_shards(paths_in(sample), folder, tar_bytes=TAR_BYTES)
    assert files_in(folder) == whole and report.num_kept == len(there) - 1


def test_a_second_run_changes_nothing(shards, sample):
    before = {path: path.stat().st_mtime_ns for path in shards.glob("*.tar")}
    report = write_tar_shards(paths_in(sample), shards, tar_bytes=TAR_BYTES)
    assert before == {path: path.stat().st_mtime_ns for path in shards.glob("*.tar")}
    assert report.num_kept == len(report.tars) == len(before)


@pytest.fixture
def own(sample: Path, tmp_path: Path) -> Path:
    """A copy of the sample's records and images."""
    shutil.copytree(sample / "images", tmp_path / "own" / "images", copy_function=shutil.copyfile)
    for path in paths_in(sample):
        shutil.copyfile(path, tmp_path / "own" / path.name)
    return tmp_path / "own"


def test_unusable_images_are_named_or_their_records_left_out_and_counted(own, tmp_path):
    broken = {"frame-0003.jpg", "frame-0004.jpg"}
    (own / "images" / "frame-0003.jpg").write_bytes(b"no image")
    (own / "images" / "frame-0004.jpg").unlink()
    with pytest.raises(ImageError, match=r"2 of 66 images cannot be used(.|\n)*jsonl:\d+(.|\n)*--skip-missing"):
        write_tar_shards(paths_in(own), tmp_path / "tars", tar_bytes=TAR_BYTES)
    assert not (tmp_path / "tars").exists()
    report = write_tar_shards(paths_in(own), tmp_path / "tars", tar_bytes=TAR_BYTES, skip_missing=True)
    lost = [record for record in records(own) if record.images[0].name in broken]
    assert lost and sum(report.left_out.values()) == len(lost)
    assert len(records(tmp_path / "tars")) == sum(report.records.values()) == len(records(own)) - len(lost)


def test_a_file_that_would_have_no_records_left_is_refused(own, tmp_path):
    shutil.rmtree(own / "images")
    with pytest.raises(ImageError, match="a file would have no records left"):
        write_tar_shards([own / "val.jsonl"], tmp_path / "tars", tar_bytes=TAR_BYTES, skip_missing=True)
    assert not (tmp_path / "tars").exists()


def test_an_image_that_changes_during_the_run_is_an_error(own, tmp_path, monkeypatch):
    read = tar_shards.read_many
    monkeypatch.setattr(tar_shards, "read_many", lambda paths: ((path, data + b"x") for path, data in read(paths)))
    with pytest.raises(ImageError, match="changed while it was written"):
        write_tar_shards([own / "val.jsonl"], tmp_path / "tars", tar_bytes=TAR_BYTES)
    assert not list((tmp_path / "tars").glob("*.tar"))


def of_other_records(own: Path, folder: Path) -> None:
    """Tar shards of the same records in another order."""
    write_tar_shards([own / "val.jsonl"], folder, tar_bytes=TAR_BYTES)
    lines = (own / "val.jsonl").read_text().splitlines(keepends=True)
    (own / "val.jsonl").write_text("".join(reversed(lines)))


OTHER: dict[str, Callable[[Path, Path], Any]] = {
    "is not empty": lambda own, folder: write_lines(folder / "mine.txt"),
    "is a file": lambda own, folder: folder.write_text("x"),
    "tar shards: of other images": lambda own, folder: write_tar_shards(
        [own / "test.jsonl"], folder, tar_bytes=TAR_BYTES
    ),
    "of another size": lambda own, folder: write_tar_shards([own / "val.jsonl"], folder, tar_bytes=TAR_BYTES // 3),
    r"val\.jsonl holds other records": of_other_records,
}


@pytest.mark.parametrize("message", OTHER)
def test_a_folder_with_other_content_is_refused_and_unchanged(own, tmp_path, message):
    folder = tmp_path / "tars"
    OTHER[message](own, folder)
    before = files_in(folder) or folder.read_bytes()
    with pytest.raises(UsageError, match=message):
        write_tar_shards([own / "val.jsonl"], folder, tar_bytes=TAR_BYTES)
    assert before == (files_in(folder) or folder.read_bytes())


def test_records_files_that_would_get_one_name_are_refused(own, tmp_path):
    paths = [own / name for name in ("a/train.jsonl", "b/train.jsonl")]
    for path in paths:
        path.parent.mkdir()
        path.write_text((own / "val.jsonl").read_text().replace("images/", "../images/"))
    with pytest.raises(UsageError, match="rename it"):
        write_tar_shards(paths, tmp_path / "tars", own, tar_bytes=TAR_BYTES)


def test_free_space_is_checked_before_anything_is_written(own, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(DiskFull, match="are missing"):
        write_tar_shards([own / "val.jsonl"], tmp_path / "tars", tar_bytes=TAR_BYTES)
    assert not (tmp_path / "tars").exists()


def test_a_full_disk_keeps_finished_tar_shards(own, tmp_path, monkeypatch):
    folder = tmp_path / "tars"
    stop_after(monkeypatch, 6, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(DiskFull, match="Finished tar shards are kept"):
        write_tar_shards([own / "val.jsonl"], folder, tar_bytes=TAR_BYTES // 3)
    assert files_in(folder).keys() >= {"images.ndjson", "images-00000.tar"}
    assert not list(folder.glob(f"*{TEMPORARY_MARK}*"))
    write_tar_shards([own / "val.jsonl"], folder, tar_bytes=TAR_BYTES // 3)
    assert len(read_records(folder / "val.jsonl")) == len(read_records(own / "val.jsonl"))


def test_text_only_records_are_kept(tmp_path):
    line = {"images": [], "turns": [{"question": "What is a polyp?", "answer": "a growth"}]}
    report = write_tar_shards([write_lines(tmp_path / "text.jsonl", line)], tmp_path / "tars", tar_bytes=TAR_BYTES)
    assert report.tars == () and read_records(tmp_path / "tars" / "text.jsonl")[0].turns[0].answer == "a growth"


def test_the_command_writes_and_reports(sample, tmp_path):
    words = ("data", "tar", sample / "train.jsonl", sample / "val.jsonl", tmp_path / "tars", "--tar-mb", 1)
    result = run(*words)
    assert result.exit_code == 0 and "train.jsonl" in result.stdout and "images" in result.stdout
    value = json.loads(run(*words, "--json").stdout)
    assert value["num_kept"] == len(value["tars"]) and value["records"].keys() == {"train.jsonl", "val.jsonl"}
