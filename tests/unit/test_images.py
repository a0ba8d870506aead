"""Images are known by the bytes of their files, and missing ones are all found before any work starts."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from lookonce.datasets.images import image_key, index_images
from lookonce.datasets.records import Record
from lookonce.errors import ImageError


def record(*images: Path, origin: str = "train.jsonl:1") -> Record:
    return Record(images, turns=(), origin=origin)


def file(folder: Path, name: str, content: bytes = b"pixels") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [b"", b"pixels", bytes(3_000_000)], ids=["empty", "small", "large"])
def test_key_is_the_sha256_of_the_bytes_in_full_width(tmp_path: Path, content: bytes) -> None:
    assert image_key(file(tmp_path, "a.jpg", content)) == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
def test_two_paths_with_the_same_bytes_are_one_image_found_under_the_first_name(tmp_path: Path, reverse: bool) -> None:
    names = sorted(("a.jpg", "b.jpg", "c.jpg"), reverse=reverse)
    index = index_images([record(file(tmp_path, name)) for name in names])
    key = hashlib.sha256(b"pixels").hexdigest()
    assert index.key_of == {tmp_path / "a.jpg": key, tmp_path / "b.jpg": key, tmp_path / "c.jpg": key}
    assert index.path_of == {key: tmp_path / "a.jpg"}
    assert (index.num_files, index.num_distinct) == (3, 1)


def test_link_and_its_target_are_one_image(tmp_path: Path) -> None:
    target, link = file(tmp_path, "b.jpg"), tmp_path / "a.jpg"
    link.symlink_to(target)
    assert index_images([record(link, target)]).num_distinct == 1


def test_file_that_many_records_name_is_counted_once(tmp_path: Path) -> None:
    a, b = file(tmp_path, "a.jpg", b"a"), file(tmp_path, "b.jpg", b"b")
    index = index_images([record(a), record(b, a), record(a)])
    assert list(index.key_of) == [a, b]
    assert index.num_distinct == 2


def test_edited_file_is_another_image_even_with_name_size_and_time_unchanged(tmp_path: Path) -> None:
    path = file(tmp_path, "a.jpg", b"before")
    before, stat = index_images([record(path)]).key_of[path], path.stat()
    path.write_bytes(b"edited")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert index_images([record(path)]).key_of[path] != before


def test_records_without_images_have_an_empty_index() -> None:
    assert index_images([record()]).num_files == 0


def test_all_missing_images_are_counted_and_the_first_five_named_with_their_record(tmp_path: Path) -> None:
    records = [record(tmp_path / f"{number}.jpg", origin=f"train.jsonl:{number}") for number in range(1, 8)]
    with pytest.raises(ImageError) as refusal:
        index_images([record(file(tmp_path, "there.jpg")), *records])
    first, *named, more, advice = str(refusal.value).splitlines()
    assert first == "7 of 8 images are not there, or may not be read:"
    assert named == [f"  {tmp_path / f'{number}.jpg'} (train.jsonl:{number})" for number in range(1, 6)]
    assert more == "  and 2 more"
    assert "data.image_root" in advice


def test_an_impossible_name_is_a_missing_image(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="1 of 1 images are not there, or may not be read"):
        index_images([record(tmp_path / ("a" * 300))])


def test_five_missing_images_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ImageError) as refusal:
        index_images([record(*(tmp_path / f"{number}.jpg" for number in range(5)))])
    assert all(f"{number}.jpg" in str(refusal.value) for number in range(5))
    assert " more" not in str(refusal.value)


def test_missing_image_is_named_once_with_the_first_record_that_asks_for_it(tmp_path: Path) -> None:
    missing = tmp_path / "a.jpg"
    with pytest.raises(ImageError) as refusal:
        index_images([record(missing, origin="train.jsonl:3"), record(missing, origin="val.jsonl:1")])
    assert str(refusal.value).startswith(
        f"1 of 1 images are not there, or may not be read:\n  {missing} (train.jsonl:3)\n"
    )


@pytest.mark.parametrize("kind", ["folder", "broken link"])
def test_what_is_not_a_file_counts_as_missing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jpg"
    path.mkdir() if kind == "folder" else path.symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(ImageError, match="1 of 1 images are not there"):
        index_images([record(path)])


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that no user can read")
def test_file_that_can_not_be_read_is_named() -> None:
    with pytest.raises(ImageError, match="can not read image /proc/self/mem: "):
        index_images([record(Path("/proc/self/mem"))])
