"""The files of an audit: their names, their order, and which one is trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lookonce.datasets.audit.corpus import Corpus, short_names
from lookonce.errors import UsageError


def test_a_file_given_twice_is_refused(folder, write):
    train = write(folder / "train.jsonl", [("a.png", "Is there text?", "yes")])
    with pytest.raises(UsageError, match="given twice"):
        Corpus.read([train, folder / "." / "train.jsonl"])


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/train.jsonl"], ["train.jsonl"]),
        (["a/train.jsonl", "a/test.jsonl"], ["train.jsonl", "test.jsonl"]),
        (["a/x.jsonl", "b/x.jsonl"], ["a/x.jsonl", "b/x.jsonl"]),
    ],
)
def test_short_names_are_as_short_as_tells_files_apart(paths, names):
    assert short_names([Path(path) for path in paths]) == names


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["test.jsonl", "train.jsonl", "val.jsonl"], ["train.jsonl", "test.jsonl", "val.jsonl"]),
        (["b.jsonl", "a.jsonl"], ["b.jsonl", "a.jsonl"]),
    ],
)
def test_the_file_named_train_else_the_first_is_trained_on(folder, named, expected, write):
    row = {"image_filename": "a.png", "question": "q", "answer": "a"}
    corpus = Corpus.read([write(folder / name, [row]) for name in named])
    assert [file.name for file in corpus.files] == expected
