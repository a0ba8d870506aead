"""The rows that a challenge scores: those that the library `datasets` draws, in its order, as they were published."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from support.rows import jpeg_of, write_lines

from lookonce.datasets.prepare.definition import find_definition
from lookonce.datasets.prepare.run import Options, Prepared, prepare, report_text
from lookonce.datasets.records import read_records
from lookonce.errors import UsageError

NUM_ROWS = 30


def rows(part: str, number: int) -> list[dict[str, Any]]:
    """Some questions about ten images of which train and test share five; many are alike, some untidy."""
    first = 0 if part == "train" else 5
    return [
        {
            "img_id": f"im{first + n % 10}",
            "question": f"  What   is seen, {n}? " if n % 7 == 3 else f"What is seen, {n // 20}?",
            "answer": f"A polyp {n // 40}.",
            "complexity": 1 + n % 3,
        }
        for n in range(number)
    ]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Prepared]:
    """Prepares an x1 whose test part has two files and whose samples have 30 rows."""

    def make(num_test: int = 130, num_images: int = 15, **changes: Any) -> Prepared:
        for number in range(num_images):
            path = tmp_path / "in" / "images" / f"im{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg_of(number))
        write_lines(tmp_path / "in" / "train-00000.jsonl", *rows("train", 50))
        test = rows("test", num_test)
        for number, some in enumerate((test[:70], test[70:])):
            write_lines(tmp_path / "in" / f"test-0000{number}.jsonl", *some)
        values = find_definition("kvasir-vqa-x1").model_dump(mode="json", by_alias=True)
        assert {drawn["num_rows"] for drawn in values["samples"].values()} == {1500}
        for drawn in values["samples"].values():
            drawn["num_rows"] = NUM_ROWS
        (tmp_path / "x1.yaml").write_text(yaml.safe_dump(values | changes))
        return prepare(str(tmp_path / "x1.yaml"), tmp_path / "out", Options(str(tmp_path / "in"), split="official"))

    return make


@pytest.mark.guarantee("The rows of a challenge are those that its scripts draw, in their order.")
@pytest.mark.parametrize("name", ["medico-task1", "medico-task2"])
def test_a_sample_is_what_the_library_datasets_draws(name, made):
    prepared = made()
    drawn = datasets.Dataset.from_list(rows("test", 130))
    if name == "medico-task2":
        drawn = drawn.filter(lambda row: row["complexity"] == 1)
    drawn = drawn.shuffle(seed=42).select(range(NUM_ROWS))
    records = read_records(prepared.folder / f"{name}.jsonl")
    assert [record.turns[0].question for record in records] == drawn["question"]
    assert [record.turns[0].answer for record in records] == drawn["answer"]
    assert [record.images[0].stem for record in records] == [record.metadata["img_id"] for record in records]
    assert [record.metadata["img_id"] for record in records] == drawn["img_id"]
    assert [record.metadata["val_id"] for record in records] == list(range(NUM_ROWS))
    leaked = sum(int(name.removeprefix("im")) < 10 for name in drawn["img_id"])
    assert prepared.report["samples"][name]["about_images_in_train"] == leaked > 0
    assert f"{name}.jsonl: 30 rows of test in a challenge's order, {leaked} about" in report_text(prepared.report)


def test_a_sample_that_is_not_whole_is_not_written_and_named(made):
    prepared = made(num_test=60, num_images=14)
    assert not [*prepared.folder.glob("medico-*")] and (prepared.folder / "test.jsonl").exists()
    said = report_text(prepared.report)
    for name, described in prepared.report["samples"].items():
        assert (
            f"{name}.jsonl is not written: {described['missing']} of its 30 rows of test are not in the source" in said
        )
    assert prepared.report["samples"]["medico-task2"]["missing"] > 10  # of 20 rows of complexity 1 some have no image


def test_a_sample_cannot_take_the_name_of_a_part(made):
    with pytest.raises(UsageError, match="test.jsonl is a part of the split; choose another name"):
        made(samples={"test": {"num_rows": 3}})
