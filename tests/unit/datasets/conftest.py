"""Fixtures of datasets: images with names of every kind, the archives to write them into, and an index of files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from lookonce.datasets.images import ImageIndex, index_images
from lookonce.datasets.records import Record

EMBEDDED = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


class ArchiveWriter:
    """Writes images, by name, into a folder or an archive."""

    def folder(self, path: Path, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)

    def tar(self, path: Path, files: Mapping[str, bytes] | list[tuple[str, bytes]], **options: Any) -> None:
        with tarfile.open(path, "w", **options) as tar:
            for name, content in files.items() if isinstance(files, Mapping) else files:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))

    def tar_of_folder(self, path: Path, files: Mapping[str, bytes]) -> None:
        """Write member names as `tar --create .` does."""
        self.tar(path, {f"./{name}": content for name, content in files.items()})

    def struct(self, path: Path, files: Mapping[str, bytes], row_group_size: int = 2) -> None:
        """Write a parquet file with bytes and paths."""
        rows = [{"bytes": content, "path": name} for name, content in files.items()]
        self.table(path, row_group_size, image=pa.array(rows, EMBEDDED), question=pa.array(["?"] * len(rows)))

    def plain(self, path: Path, files: Mapping[str, bytes], row_group_size: int = 2) -> None:
        """Write a parquet file with bytes alone."""
        self.table(path, row_group_size, pixels=pa.array(list(files.values()), pa.binary()))

    def table(self, path: Path, row_group_size: int, **columns: pa.Array) -> None:
        parquet.write_table(pa.table(columns), path, row_group_size=row_group_size)


@pytest.fixture(scope="session")
def writer() -> ArchiveWriter:
    return ArchiveWriter()


@pytest.fixture(scope="session")
def named_images() -> dict[str, bytes]:
    """File contents by name; the names are of every kind."""
    return {
        "polyp/a.jpg": b"first",
        "polyp/b.jpg": b"second",
        "c.JPG": b"third",
        "d.e.f.jpg": b"several dots",
        "größe/œuvre 内視鏡.png": b"unicode",
        "__meta__/g.jpg": b"underscores",
    }


@pytest.fixture(scope="session")
def index() -> Callable[..., ImageIndex]:
    """Indexes files, those of one record."""
    return lambda *paths: index_images([Record(paths, turns=())])
