"""Image paths in records: what is inside the image root, and what is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookonce.datasets.records import read_records


def write(folder: Path, row: dict[str, Any]) -> Path:
    path = folder / "train.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path


def llava(image: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": "Is there text?"}, {"from": "gpt", "value": "yes"}]
    return {"image": image, "conversations": turns}


def flat(image: str) -> dict[str, Any]:
    return {"image_filename": image, "question": "Q", "answer": "A"}


@pytest.mark.parametrize("row", [llava, flat])
@pytest.mark.parametrize(
    "name", ["{}/there/a.jpg", "file://{}/there/a.jpg", "file://localhost{}/there/a.jpg", "/{}/there/a.jpg"]
)
def test_an_absolute_path_is_kept_unless_an_image_root_is_given(
    tmp_path: Path, row: Callable[[str], dict[str, Any]], name: str
) -> None:
    records = tmp_path / "here"
    records.mkdir()
    path = write(records, row(name.format(tmp_path)))
    assert read_records(path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert read_records(path, tmp_path)[0].images == (tmp_path / "there" / "a.jpg",)
    assert str(read_records(path, records)[0].images[0]) == f"{records}/../there/a.jpg"


def test_a_relative_path_cannot_leave_the_folder_even_where_an_absolute_one_may(tmp_path: Path) -> None:
    records = tmp_path / "here"
    records.mkdir()
    [record] = read_records(write(records, llava("../there/a.jpg")))
    assert str(record.images[0]) == f"{records}/../there/a.jpg"
