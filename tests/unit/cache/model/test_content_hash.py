"""Hashes of a model: any change of a byte that training reads changes them, and moving the folder does not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from lookonce.cache.format import read_header
from lookonce.cache.store.fingerprint import hash_language_model
from lookonce.errors import ModelError

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(sample: Path, tmp_path: Path) -> Path:
    """A copy of the sample's model."""
    return Path(shutil.copytree(sample / "model", tmp_path / "model"))


def tensors(folder: Path, *, of_tower: bool) -> list[str]:
    names = read_header(folder / WEIGHTS)[0].keys() - {"__metadata__"}
    return sorted(name for name in names if name.startswith("model.visual.") == of_tower)


def change(folder: Path, tensor: str) -> None:
    """Flip the last bit of a tensor."""
    header, start = read_header(folder / WEIGHTS)
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(start + header[tensor]["data_offsets"][1] - 1)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_moved_model_has_the_same_hash(sample, model):
    assert hash_language_model(model) == hash_language_model(sample / "model")


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "config.json"])
def test_each_file_counts(model, name):
    before = hash_language_model(model)
    with (model / name).open("a") as file:
        file.write(" ")
    assert hash_language_model(model) != before


def test_a_vocabulary_in_the_older_files_counts_and_a_note_does_not(model):
    hashes = []
    for name in ("merges.txt", "vocab.txt", "notes.txt", "README.md"):
        (model / name).write_text("a b")
        hashes.append(hash_language_model(model))
    assert len({*hashes}) == 2 and hashes[1] == hashes[-1]


def test_each_tensor_of_the_language_model_counts(model):
    names = tensors(model, of_tower=False)
    seen = {hash_language_model(model)}
    for name in names:
        change(model, name)
        seen.add(hash_language_model(model))
    assert len(seen) == len(names) + 1


def test_the_hash_of_the_language_model_does_not_read_the_tower(model):
    rest = hash_language_model(model)
    change(model, tensors(model, of_tower=True)[0])
    assert hash_language_model(model) == rest


@pytest.mark.parametrize(
    "content", [b"", b"\x08\x00\x00\x00\x00\x00\x00\x00no json!", b"\xff" * 20, b"\x02" + bytes(7) + b"[]"]
)
def test_broken_weights_are_an_error(model, content):
    (model / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelError, match=f"cannot read .*{WEIGHTS}"):
        hash_language_model(model)
