"""Records with several images, with one image twice, and with none, in the cache, in training and in evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.errors import UsageError
from lookonce.eval.answerer import Answerer
from lookonce.eval.run import evaluate_run
from lookonce.run.config import RunFile
from lookonce.run.folder import RunFolder
from lookonce.run.open import TO_BUILD, open_run
from lookonce.workflow import train

MODES = ("shared", "packed", "separate")
TURNS = (Turn("Is there text?", "yes"), Turn("How many polyps are in the image?", "2"))


@pytest.fixture
def start(make_run: Callable[..., RunFile], tmp_path: Path) -> Callable[..., RunFile]:
    """Writes records in common formats and builds their cache; returns a run on them, validated on some of them."""

    def start(records: list[Record], num_held_out: int, mode: str) -> RunFile:
        write_records(tmp_path / "train.jsonl", records, format="sharegpt", absolute=True)
        write_records(tmp_path / "val.jsonl", records[:num_held_out], format="openai", absolute=True)
        data = {"train": str(tmp_path / "train.jsonl"), "val": str(tmp_path / "val.jsonl"), "test": []}
        batch = {"samples_per_step": len(records), "mode": mode, "tokens_per_pack": 2000}
        run = make_run(data=data, train={"steps": 1}, batch=batch, output=str(tmp_path / mode))
        open_run(run, TO_BUILD).build()
        return run

    return start


def losses(run: RunFile) -> list[float]:
    lines = map(json.loads, RunFolder(run.output).log.read_text().splitlines())
    return [line[name] for line in lines for name in ("loss", "eval_loss") if name in line]


def predictions(run: RunFile) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunFolder(run.output).predictions("val").read_text().splitlines()]


@pytest.mark.guarantee("Records with any number of images train alike in every batch mode.")
def test_records_with_any_number_of_images_train_alike_in_every_mode(
    sample: Path, start: Callable[..., RunFile]
) -> None:
    first, second, third = sorted((sample / "images").glob("*.jpg"))[:3]
    groups = [(first, second), (), (first, first), (second, first), (first, second, third), (first,)]
    records = [Record(images, (turn,)) for turn in TURNS for images in groups]
    records += [Record(images, TURNS, system="Answer briefly.") for images in groups]
    found = []
    for mode in MODES:
        run = start(records, 3, mode)
        summary = train(run, notify=lambda note: None)
        assert summary is not None
        assert (summary.num_files, summary.num_samples, summary.num_too_long) == (3, len(records), 0)
        shown = [[str(image) for image in images] for images in groups[:3]]
        assert [line["images"] for line in predictions(run)] == shown
        assert f"--image {first}" in summary.next_command
        found.append(losses(run))
    assert len(found[0]) == 2
    assert found[1:] == [pytest.approx(found[0], rel=1e-5)] * 2
    assert evaluate_run(run.output, baselines=("shuffled",))[0].overall.num_questions == 3
    for line in predictions(run)[:2]:
        [answer] = Answerer.open(run.output).answer(tuple(line["images"]), line["question"])
        assert answer.text == line["predicted"]


def test_records_without_any_image_are_trained_and_evaluated(start: Callable[..., RunFile]) -> None:
    records = [Record((), (turn,)) for turn in TURNS] + [Record((), TURNS)]
    run = start(records, 1, "shared")
    summary = train(run, notify=lambda note: None)
    assert summary is not None
    assert (summary.num_files, summary.num_samples, summary.num_questions) == (0, 3, 1)
    assert "eval" in summary.next_command
    with pytest.raises(UsageError, match="at least two distinct images, and these records have 0"):
        evaluate_run(run.output, baselines=("shuffled",))
    notes: list[str] = []
    scored, _ = evaluate_run(run.output, baselines="all", notify=notes.append)
    assert list(scored.baselines) == ["majority", "untuned"]
    assert sum(note.endswith("this baseline is left out") for note in notes) == 1


def test_all_record_formats_are_the_same_run(sample: Path, make_run: Callable[..., RunFile], tmp_path: Path) -> None:
    records = read_records(sample / "test.jsonl")
    write_records(tmp_path / "a.parquet", records, sample, format="parts")
    write_records(tmp_path / "a.csv", records, sample)
    write_records(tmp_path / "a.json", records, sample, format="llava")
    data = {"image_root": str(sample), "val": [], "test": []}
    runs = [make_run(data=data | {"train": str(path)}) for path in (sample / "test.jsonl", *tmp_path.glob("a.*"))]
    assert len(runs) == 4
    identities = [open_run(run, TO_BUILD).identity()["records"] for run in runs]
    assert identities[1:] == [identities[0]] * 3
