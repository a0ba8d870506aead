"""The tar reader: members, and WebDataset samples."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from webdataset import TarWriter

from lookonce.datasets.archives import has_json, read_samples, read_tar_members


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        for key in ("x/1", "x/2"):
            writer.write({"__key__": key, "jpg": key.encode(), "json": {"question": key}})
    return tmp_path / "a.tar"


def test_members_are_read_in_order_or_by_name(path: Path) -> None:
    assert [name for name, _ in read_tar_members(path)] == ["x/1.jpg", "x/1.json", "x/2.jpg", "x/2.json"]
    assert list(read_tar_members(path, lambda name: name == "x/2.jpg")) == [("x/2.jpg", b"x/2")]


def test_samples_group_members_by_key(path: Path) -> None:
    first, second = read_samples(path, "a.tar")
    assert (first["__key__"], first["__url__"], first["jpg"]) == ("x/1", "a.tar", b"x/1")
    assert second["json"] == b'{"question": "x/2"}'


def test_a_tar_has_json_if_its_first_members_say_so_or_it_is_damaged(path: Path, tmp_path: Path) -> None:
    with TarWriter(str(tmp_path / "images.tar")) as writer:
        writer.write({"__key__": "a", "jpg": b"x"})
    (tmp_path / "damaged.tar").write_bytes(b"x" * 2000)
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    found = {name: has_json(tmp_path / name) for name in ("a.tar", "images.tar", "damaged.tar", "empty.tar")}
    assert found == {"a.tar": True, "images.tar": False, "damaged.tar": True, "empty.tar": False}
