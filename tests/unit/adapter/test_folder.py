"""What beside the weights goes into a merged folder, and how its configuration and index change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookonce.adapter.merge import check_frozen, copy_other_files, weight_files
from lookonce.adapter.weights import Plan, Planned, Stored
from lookonce.errors import ModelError, UsageError


def model_folder(folder: Path, config: dict, *files: str, index: dict | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", *files):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    (tmp_path / "merged").mkdir()
    return tmp_path / "merged"


def plan_of(**names: str) -> Plan:
    """A plan with one tensor of 8 bytes each, in files."""
    files: dict[str, list[Planned]] = {}
    for name, file in names.items():
        stored = Stored(name, "F32", (2,), 8)
        files.setdefault(f"{file}.safetensors", []).append(Planned(stored, stored))
    return Plan(files, is_untied="lm_head" in names)


def test_files_behind_links_are_copied_and_not_linked(tmp_path, merged):
    """A model of the Hub is a folder of links."""
    real = model_folder(tmp_path / "real", {"a": 1}, "LICENSE")
    (tmp_path / "model").mkdir()
    for path in real.iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    copy_other_files(tmp_path / "model", merged, Plan({}), None)
    copied = merged / "LICENSE"
    assert not copied.is_symlink() and copied.read_bytes() == (real / "LICENSE").read_bytes()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}),
        ({"text_config": {"dtype": "bfloat16"}}, {"text_config": {"dtype": "float32"}, "dtype": "float32"}),
        ({}, {"dtype": "float32"}),
    ],
)
def test_in_fp32_the_configuration_names_the_type(tmp_path, merged, config, expected):
    folder = model_folder(tmp_path / "model", config)
    copy_other_files(folder, merged, Plan({}), "float32")
    assert json.loads((merged / "config.json").read_text()) == expected


def test_untied_embeddings_are_in_the_configuration_and_the_index(tmp_path, merged):
    index = {"metadata": {"total_size": 8, "more": 1}, "weight_map": {"embed": "b.safetensors"}}
    files = ["a.safetensors", "b.safetensors"]
    config = {"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": True}
    folder = model_folder(tmp_path / "model", config, *files, index=index)
    copy_other_files(folder, merged, plan_of(embed="b", lm_head="b"), None)
    found = json.loads((merged / "config.json").read_text())
    assert found == {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": False}
    found = json.loads((merged / "model.safetensors.index.json").read_text())
    assert found["metadata"] == {"total_size": 16, "more": 1}
    assert found["weight_map"] == {"embed": "b.safetensors", "lm_head": "b.safetensors"}


def test_a_missing_file_of_weights_is_named(tmp_path):
    folder = model_folder(tmp_path / "model", {}, index={"weight_map": {"x": "gone.safetensors"}})
    with pytest.raises(ModelError, match=r"has no gone\.safetensors"):
        weight_files(folder)


@pytest.mark.parametrize(("frozen", "is_refused"), [("fp8", False), ("nf4", True)])
def test_an_adapter_of_rounded_weights_needs_the_flag(make_run, frozen, is_refused):
    run, command = make_run(train={"frozen": frozen}), "lookonce adapter merge RUN DIR"
    check_frozen(run, command, allows_unquantised=True)
    if not is_refused:
        return check_frozen(run, command, allows_unquantised=False)
    with pytest.raises(UsageError, match=rf"quantised to {frozen}.*: {command} --onto-unquantised\n"):
        check_frozen(run, command, allows_unquantised=False)
