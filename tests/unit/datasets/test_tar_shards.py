"""The content and the size of a tar shard are known in advance."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lookonce.datasets.formats.image_references import suffix_of_format
from lookonce.datasets.images import ImageInfo
from lookonce.datasets.records import read_records
from lookonce.datasets.tar_shards import TarShard, plan_tar_shards, tar_size, write_tar_shards

SPLITS = ("train", "val", "test")


TAR_BYTES = 300_000
"""Gives seven tar shards of the sample's images."""


@pytest.fixture(scope="module")
def shards(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tar shards of the sample's three splits. Tests must not write to them."""
    folder = tmp_path_factory.mktemp("tars") / "tars"
    write_tar_shards([sample / f"{split}.jsonl" for split in SPLITS], folder, tar_bytes=TAR_BYTES)
    return folder


def test_suffixes_follow_the_image_format_and_not_the_file_name(tmp_path: Path):
    for name, kind in (("a.jpg", "PNG"), ("b", "JPEG"), ("c.d.e.jpeg", "JPEG"), ("f.tiff", "TIFF")):
        Image.new("RGB", (40, 40), (len(name), 0, 0)).save(tmp_path / name, kind)
    lines = [
        {"image_filename": path.name, "question": "Is it?", "answer": "yes"} for path in sorted(tmp_path.iterdir())
    ]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_tar_shards([tmp_path / "all.jsonl"], tmp_path / "tars", tar_bytes=TAR_BYTES)
    found = [record.images[0].suffix for record in read_records(tmp_path / "tars" / "all.jsonl")]
    assert found == [".png", ".jpg", ".jpg", ".tif"]


@given(st.lists(st.integers(1, 500), max_size=40), st.integers(1, 900))
def test_tar_shards_hold_every_image_in_order_within_the_size(sizes, tar_bytes):
    images = [ImageInfo(Path(str(number)), f"{number:064x}", num) for number, num in enumerate(sizes)]
    shards = plan_tar_shards(images, tar_bytes)
    assert [image for shard in shards for image in shard.images] == images
    assert all(len(shard.images) == 1 or sum(i.num_bytes for i in shard.images) <= tar_bytes for shard in shards)
    assert len({shard.name for shard in shards}) == len(shards)


def test_the_size_of_a_tar_shard_is_known_in_advance(shards: Path):
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
