"""Images in a folder, in tar files and in parquet files give the same cache: fingerprint, keys and bytes."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.rows import EMBEDDED, write_lines
from support.small_caches import features_in

from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, TO_BUILD_BY_PLAN, open_run

NUM_IMAGES = 24
MakeSource = Callable[[str], RunFile]


@pytest.fixture(scope="module")
def files(sample: Path) -> dict[str, bytes]:
    """Frames of the sample, one of them twice, and two files that are not images."""
    frames = sorted((sample / "images").glob("frame-*.jpg"))[:NUM_IMAGES]
    found = {path.name: path.read_bytes() for path in frames}
    assert len(set(found.values())) == NUM_IMAGES
    return found | {"copy.jpg": frames[3].read_bytes(), "text.jpg": b"no image", "empty.jpg": b""}


def write_folder(root: Path, files: dict[str, bytes]) -> list[str]:
    for name, content in files.items():
        (root / name).write_bytes(content)
    return list(files)


def write_tars(root: Path, files: dict[str, bytes]) -> list[str]:
    """Two tar files, with the images in another order."""
    names = sorted(files, reverse=True)
    parts = {"a.tar": names[::2], "b.tar": names[1::2]}
    for archive, members in parts.items():
        with tarfile.open(root / archive, "w") as tar:
            for name in members:
                member = tarfile.TarInfo(name)
                member.size = len(files[name])
                tar.addfile(member, io.BytesIO(files[name]))
    return [f"{archive}/{name}" for archive, members in parts.items() for name in members]


def write_parquet(root: Path, files: dict[str, bytes]) -> list[str]:
    rows = [{"bytes": content, "path": name} for name, content in files.items()]
    parquet.write_table(pa.table({"image": pa.array(rows, EMBEDDED)}), root / "x.parquet", row_group_size=5)
    return [f"x.parquet/{row}" for row in range(len(files))]


def write_mixed(root: Path, files: dict[str, bytes]) -> list[str]:
    names = list(files)
    parts = [{name: files[name] for name in names[part::3]} for part in range(3)]
    return [*write_folder(root, parts[0]), *write_tars(root, parts[1]), *write_parquet(root, parts[2])]


SOURCES = {"folder": write_folder, "tar": write_tars, "parquet": write_parquet, "mixed": write_mixed}


@pytest.fixture
def make_source(
    make_run: Callable[..., RunFile], files: dict[str, bytes], tmp_path: Path, files_are_old: None
) -> MakeSource:
    """Makes a run on the files in one of `SOURCES`, with its own cache."""

    def make(source: str) -> RunFile:
        root = tmp_path / source
        root.mkdir()
        names = SOURCES[source](root, files)
        rows = [{"image_filename": name, "question": "Is it?", "answer": "yes"} for name in names]
        data = {"train": str(write_lines(root / "records.jsonl", *rows)), "val": [], "test": []}
        return make_run(data=data, cache={"dir": str(root / "caches")})

    return make


@pytest.mark.guarantee("A folder, a tar file and a parquet file of the same images make the same cache.")
def test_the_cache_is_the_same_wherever_the_images_are_and_serves_all_other_places(make_source):
    caches, folders, failed = [], set(), []
    runs = {source: make_source(source) for source in SOURCES}
    for source, run in runs.items():
        inputs = open_run(run, TO_BUILD)
        report = inputs.build()
        assert (report.num_encoded, report.num_wanted) == (NUM_IMAGES, NUM_IMAGES + 2), source
        assert inputs.images.num_files == NUM_IMAGES + 3
        caches.append(features_in(inputs.cache_folder))
        folders.add(inputs.cache_folder.name)
        failed.append(set(report.quarantined))
    assert len(folders) == 1
    assert len(caches[0]) == NUM_IMAGES
    assert all(cache == caches[0] for cache in caches)
    assert len(failed[0]) == 2 and all(keys == failed[0] for keys in failed)
    for one, other in itertools.pairwise([*runs.values(), runs["folder"]]):
        report = open_run(one.model_copy(update={"cache": other.cache}), TO_BUILD).build()
        assert (report.num_encoded, report.num_reused) == (0, NUM_IMAGES)


def test_a_truncated_archive_is_reported_and_its_images_are_tried_again(make_source):
    run = make_source("tar")
    open_run(run, TO_BUILD).write_plan()
    archive = run.data.train[0].parent / "a.tar"
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 3])
    inputs = open_run(run, TO_BUILD_BY_PLAN)
    report = inputs.build()
    reported = [reason for reason in report.quarantined.values() if "the archive" in reason]
    assert 0 < len(reported) < NUM_IMAGES / 2
    twice = any("copy.jpg" in reason or "frame-0003" in reason for reason in reported)  # their other copy is in b.tar
    assert report.num_encoded == NUM_IMAGES - len(reported) + twice
    archive.write_bytes(whole)
    report = open_run(run, TO_BUILD_BY_PLAN).build()
    assert len(report.quarantined) == 2
    assert len(features_in(inputs.cache_folder)) == NUM_IMAGES
