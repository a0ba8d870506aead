"""Files that the Hub does not list are found if a program would read them."""

from __future__ import annotations

import pytest

from lookonce.hub import unlisted

STATED = {"config.json", "model.safetensors", "data/train.parquet"}


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.index.json",
        "model-extra.safetensors",
        "adapter_config.json",
        "adapter_model.bin",
        "original/consolidated.00.PTH",
        "modeling.py",
        "below/modeling.py",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
    ],
)
def test_what_a_loader_of_models_reads_is_found(tmp_path, kind, name):
    assert unlisted(tmp_path, [*STATED, name], STATED, kind) == [name]


@pytest.mark.parametrize("name", ["data/more.parquet", "b.TAR", "rows.jsonl", "report.json", "images.zip", "data.py"])
def test_what_a_reader_of_datasets_reads_is_found(tmp_path, name):
    assert unlisted(tmp_path, [*STATED, name], STATED, "dataset") == [name]


def test_patterns_name_more_files(tmp_path):
    names = ["images/a.JPG", "images/deep/b.png", "c.jpg"]
    assert unlisted(tmp_path, names, STATED, "dataset") == []
    assert unlisted(tmp_path, names, STATED, "dataset", ["images/*"]) == names[:2]


@pytest.mark.parametrize("kind", ["model", "adapter", "dataset"])
@pytest.mark.parametrize("name", ["notes.txt", "NOTES.md", "model-q4.gguf", ".cache/a.json", ".b.json", "x/.git/c.py"])
def test_notes_and_hidden_files_are_left_alone(tmp_path, kind, name):
    assert unlisted(tmp_path, [*STATED, name], STATED, kind) == []


@pytest.mark.parametrize("name", ["templates", "config.json"])
def test_a_link_to_a_folder_is_found_also_in_place_of_a_file(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / name).symlink_to("elsewhere")
    assert unlisted(tmp_path, [name], STATED, "model") == [name]
