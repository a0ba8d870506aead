"""`lookonce data convert --split`: no image, and no group of images that belong together, is in two parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.rows import png, write_lines
from support.rows import run as run_command

from lookonce.datasets.images import image_key
from lookonce.datasets.records import Record, read_records

PARTS = ("train", "val", "test")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Twenty images with three questions each, a copy of each under another name, and a record about two of them."""
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, Any]] = []
    for number in range(20):
        for name in (f"{number}.png", f"copy-{number}.png"):
            Path(name).write_bytes(png(number))
        for name in (f"{number}.png", f"{number}.png", f"copy-{number}.png"):
            asked = {"question": f"Is it {len(rows)}?", "answer": "yes"}
            rows.append({"images": [name], "turns": [asked], "metadata": {"patient": number // 2}})
    rows.append({"images": ["0.png", "19.png"], "turns": [{"question": "Do they differ?", "answer": "yes"}]})
    rows.append({"images": [], "turns": [{"question": "What is a polyp?", "answer": "a growth"}]})
    write_lines(Path("own.jsonl"), *rows)
    return lambda *words: run_command("data", "convert", *words)


def parts_of(target: Path) -> dict[str, list[Record]]:
    paths = {part: target.with_name(f"{target.stem}.{part}{target.suffix}") for part in PARTS}
    return {part: read_records(path) for part, path in paths.items() if path.exists()}


def keys(records: list[Record]) -> set[str]:
    return {image_key(image) for record in records for image in record.images}


def are_apart(parts: list[set[Any]]) -> bool:
    return all(one.isdisjoint(other) for one, other in combinations(parts, 2))


@pytest.mark.parametrize("target", ["data/own.jsonl", "out.json", "out.parquet"])
def test_every_record_is_in_one_part_and_no_image_in_two(run, target):
    result = run("own.jsonl", target, "--split", "val=0.2,test=0.1", "--json")
    assert result.exit_code == 0, result.output
    found = parts_of(Path(target))
    assert [*found] == [*PARTS] and not Path(target).exists()
    assert sum(map(len, found.values())) == 62
    of_part = [keys(found[part]) for part in PARTS]
    assert are_apart(of_part)
    assert [len(some) for some in of_part[1:]] == [4, 2]
    parts = json.loads(result.stdout)["parts"]
    assert [(one["name"], one["num_records"]) for one in parts] == [(name, len(found[name])) for name in PARTS]
    [pair] = [part for part, records in found.items() if any(len(record.images) == 2 for record in records)]
    assert sum(len(record.images) == 2 for record in found[pair]) == 1


def test_the_seed_draws_the_parts_and_other_records_do_not_change_them(run):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run("own.jsonl", f"{name}.jsonl", "--split", "val=0.3", "--seed", seed).exit_code == 0
    a, b, c = (parts_of(Path(f"{name}.jsonl")) for name in "abc")
    assert [*a] == ["train", "val"] and keys(a["val"]) == keys(b["val"]) != keys(c["val"])


def test_records_with_the_same_value_stay_together(run):
    assert run("own.jsonl", "o.jsonl", "--split", "val=0.2,test=0.2", "--together", "patient").exit_code == 0
    found = parts_of(Path("o.jsonl"))
    patients = [{record.metadata.get("patient") for record in found[part]} - {None} for part in PARTS]
    assert are_apart(patients)


def test_images_that_cannot_be_read_count_by_their_paths(run):
    for number in range(20):
        Path(f"{number}.png").unlink()
        Path(f"copy-{number}.png").unlink()
    result = run("own.jsonl", "o.jsonl", "--split", "val=0.2")
    assert result.exit_code == 0 and "images cannot be read, so copies under other names are not" in result.stderr


MISTAKES = {
    "nothing": (("--split", ""), "--split must name shares of val"),
    "no share": (("--split", "val"), "--split must name shares of val, of test or of both"),
    "unknown part": (("--split", "dev=0.1"), "(got 'dev=0.1')"),
    "twice": (("--split", "val=0.1,val=0.2"), "--split must name"),
    "nothing left": (("--split", "val=0.5,test=0.5"), "leave some for train"),
    "percent": (("--split", "val=10%"), "such as val=0.1,test=0.1"),
    "not a number": (("--split", "val=nan"), "--split must name"),
    "too small": (
        ("--split", "val=0.001"),
        "--split leaves no image for val: 21 images in families that stay together",
    ),
    "unknown key": (
        ("--split", "val=0.1", "--together", "id"),
        "--together id: no record has this key in its metadata; k",
    ),
    "together without a split": (("--together", "patient"), "name the shares with --split"),
}


@pytest.mark.parametrize(("words", "says"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_explained_and_nothing_is_written(run, words, says):
    result = run("own.jsonl", "o.jsonl", *words)
    assert result.exit_code == 2 and says in result.stderr, result.output
    assert not list(Path().glob("o.*"))


def test_existing_parts_are_not_replaced(run):
    Path("o.val.jsonl").write_text("mine")
    result = run("own.jsonl", "o.jsonl", "--split", "val=0.1")
    assert result.exit_code == 2 and "o.val.jsonl exists; name another file" in result.stderr
    assert Path("o.val.jsonl").read_text() == "mine" and not Path("o.train.jsonl").exists()
    assert run("own.jsonl", "o.jsonl", "--split", "val=0.1", "--overwrite").exit_code == 0
