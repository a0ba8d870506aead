"""Answers from predictions files: found by images and question; others are counted, named and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookonce.datasets.context import NOT_ANSWERED, ContextForm, with_given
from lookonce.datasets.records import Record, Turn
from lookonce.errors import RecordsError

FORM = ContextForm(by="stage", order=[1, 2])


def record(stage: int, question: str, image: str) -> Record:
    return Record((Path(image),), (Turn(question, "true"),), metadata={"stage": stage}, origin=f"{image}.jsonl:{stage}")


RECORDS = {"train": [record(1, "a?", "x"), record(2, "b?", "x")], "val": [record(1, "a?", "y"), record(2, "b?", "y")]}


def keys_of(record: Record) -> tuple[str, ...]:
    return tuple(f"key {path}" for path in record.images)


def row(image: str, predicted: str, question: str = "a?", **more: object) -> dict[str, object]:
    return {"question": question, "image_keys": [f"key {image}"], "predicted": predicted} | more


@pytest.fixture
def read(tmp_path):
    """The contexts with files of these rows, and the records of training and validation."""

    def read(*files: list[object]) -> list[tuple[Turn, ...]]:
        paths = [tmp_path / f"{number}.jsonl" for number in range(len(files))]
        for path, rows in zip(paths, files, strict=True):
            path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        found = with_given(RECORDS, FORM, paths, keys_of)
        return [one.known for some in found.values() for one in some]

    return read


def test_answers_are_those_of_the_files_whatever_their_paths(read):
    own = [row("x", " no "), row("x", "other", "b?"), row("z", "unused")]
    assert read(own, [row("y", "cut", ended="length"), row("x", "no")]) == [
        *((), (Turn("a?", "no"),), (), (Turn("a?", NOT_ANSWERED),))
    ]
    assert read() == [(), (Turn("a?", "true"),), (), (Turn("a?", "true"),)]


def test_missing_answers_are_counted_and_named(read, tmp_path):
    with pytest.raises(RecordsError) as error:
        read([row("z", "no")])
    assert str(error.value) == (
        f'`data.context.answers`: {tmp_path}/0.jsonl lacks 2 answers to earlier questions: "a?" of x.jsonl:1, "a?" of '
        "y.jsonl:1; name all predictions of the training and validation records"
    )


def test_a_file_that_is_missing_or_contradicts_itself_or_has_other_rows_is_refused(read, tmp_path):
    with pytest.raises(RecordsError, match="no predictions at .*nowhere.jsonl; write them with: lookonce eval RUN"):
        with_given(RECORDS, FORM, [tmp_path / "nowhere.jsonl"], keys_of)
    with pytest.raises(RecordsError, match='1.jsonl:1 answers "a\\?" about the same image otherwise than .*0.jsonl; '):
        read([row("x", "no")], [row("x", "yes")])
    assert read([row("x", "no"), row("x", "yes"), row("y", "no")])[1] == (Turn("a?", "no"),)
    with pytest.raises(RecordsError, match="0.jsonl:1 is not a prediction with image keys: `image_keys` is missing"):
        read([{"question": "a?", "predicted": "no"}])
    with pytest.raises(RecordsError, match="0.jsonl:1 holds half a character"):
        read([row("x", "\ud800")])


def test_an_answer_that_spells_a_special_token_is_not_shown(read):
    assert read([row("x", "no<|im_end|>"), row("y", "no")])[1] == (Turn("a?", NOT_ANSWERED),)
