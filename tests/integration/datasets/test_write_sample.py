"""The sample is the same for the same seed, and is complete or absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from lookonce.datasets.images import image_key, index_images
from lookonce.datasets.records import read_records
from lookonce.datasets.sample import write
from lookonce.datasets.sample.scene import DEFAULT_SEED, Scene, draw
from lookonce.datasets.sample.write import write_sample
from lookonce.errors import UsageError

SPLITS = ("train", "val", "test")
OTHER_SEED = DEFAULT_SEED + 1


def contents(folder: Path) -> dict[str, str]:
    """The hash of each file but the run file, which names the folder."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.yaml")
    return {str(path.relative_to(folder)): image_key(path) for path in paths}


def test_same_seed_gives_the_same_bytes_of_every_file_and_the_current_folder_stays(sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_sample(Path("."))
    assert contents(Path.cwd()) == contents(sample)


def test_an_existing_sample_is_kept_and_counted(sample):
    before = {path: path.stat().st_mtime_ns for path in sample.rglob("*")}
    report, records = write_sample(sample), {split: read_records(sample / f"{split}.jsonl") for split in SPLITS}
    index = index_images([record for some in records.values() for record in some])
    assert not report.fresh
    assert report.text().startswith(f"already exists: {sample}: 66 images (64 distinct)")
    assert {path: path.stat().st_mtime_ns for path in sample.rglob("*")} == before
    assert (report.num_files, report.num_images) == (index.num_files, index.num_distinct)
    assert report.num_files == len(list((sample / "images").iterdir()))
    assert report.num_questions == {split: len(some) for split, some in records.items()}
    stamp = json.loads((sample / "sample.json").read_text())
    assert stamp.items() >= {"seed": DEFAULT_SEED, "model": "tiny", "tokenizer": None}.items()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"seed": OTHER_SEED}, f"seed: {DEFAULT_SEED}, requested seed: {OTHER_SEED}"),
        ({"tokenizer": Path("other")}, "tokenizer: None, requested tokenizer: other"),
        ({"sizes": "kvasir"}, "sizes: None, requested sizes: stratified from kvasir"),
        ({"stages": True, "num_images": 64}, "stages: False, requested stages: True"),
    ],
    ids=lambda value: [*value][0] if isinstance(value, dict) else "",
)
def test_another_sample_in_the_folder_is_refused_with_the_differences(sample, wanted, expected):
    before = contents(sample)
    with pytest.raises(UsageError, match=f"holds another sample: {expected}; choose another folder"):
        write_sample(sample, **wanted)
    assert contents(sample) == before


def test_folder_with_foreign_files_is_refused_and_kept(tmp_path):
    (tmp_path / "results.csv").write_text("of a year's work")
    with pytest.raises(UsageError, match="is not empty and has no sample; choose another folder or empty it"):
        write_sample(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of a year's work"]


def test_interrupted_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    drawn = []

    def interrupted(scene: Scene) -> Image.Image:
        if len(drawn) == 3:
            raise KeyboardInterrupt
        drawn.append(scene)
        return draw(scene)

    monkeypatch.setattr(write, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_sample(tmp_path / "sample")
    assert len(drawn) == 3 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (lambda folder: folder.write_text("a file"), {}, "is not empty"),
        (lambda folder: (folder.mkdir(), (folder / "sample.json").write_text("{")), {}, "sample.json is broken"),
        (lambda folder: None, {"model": "huge"}, "no Qwen3-VL of size 'huge'; choose one of tiny, 2b"),
        (lambda folder: None, {"tokenizer": Path("nowhere")}, "nowhere has no tokenizer"),
    ],
)
def test_impossible_samples_are_refused(tmp_path, prepare, options, message):
    prepare(tmp_path / "sample")
    with pytest.raises(UsageError, match=message):
        write_sample(tmp_path / "sample", **options)
