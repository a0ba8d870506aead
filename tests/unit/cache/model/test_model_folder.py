"""Opening a model folder: the tower's tensors from any layout of files, and clear errors for other folders."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.tower import Tower
from lookonce.errors import ModelError

INDEX = "model.safetensors.index.json"
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
TEXT_ONLY = {"model_type": "qwen3", "hidden_size": 8, **dict.fromkeys(SIZES, 1)}


def tower_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return dict(ModelFolder.open(str(folder)).tower_tensors())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_the_towers_tensors_are_all_there_in_order_of_their_names(sample):
    stored = load_file(sample / "model" / "model.safetensors")
    expected = {name.removeprefix("model.visual."): stored[name] for name in sorted(stored) if ".visual." in name}
    found = tower_tensors(sample / "model")
    assert "patch_embed.proj.weight" in found
    assert same(found, expected)


def test_a_checkpoint_in_several_files_reads_the_same(sample, model):
    tensors = load_file(model / "model.safetensors")
    file_of = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, model / file)
    (model / "model.safetensors").unlink()
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    assert same(tower_tensors(model), tower_tensors(sample / "model"))


def test_files_without_tower_tensors_are_not_opened(sample, model):
    tensors = load_file(model / "model.safetensors")
    file_of = {name: "tower.safetensors" if ".visual." in name else "absent.safetensors" for name in tensors}
    tower = {name: tensor for name, tensor in tensors.items() if ".visual." in name}
    save_file(tower, model / "tower.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": file_of}))
    assert same(tower_tensors(model), tower_tensors(sample / "model"))


def test_the_old_names_of_tensors_read_the_same(sample, model):
    tensors = load_file(model / "model.safetensors")
    old = {name.replace("model.visual.", "visual."): tensor for name, tensor in tensors.items()}
    assert not any(name.startswith("model.visual.") for name in old)
    save_file(old, model / "model.safetensors")
    assert same(tower_tensors(model), tower_tensors(sample / "model"))


def remove(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda model: (model / name).write_text(content)


def truncate(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def make_text_only(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(TEXT_ONLY))
    drop_tower(model)


def drop_tower(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".visual." not in name}
    save_file(kept, model / "model.safetensors")


UNUSABLE = {
    "no config": (remove("config.json"), "is not a model folder"),
    "config not JSON": (write("config.json", "{"), "is not a model folder"),
    "unknown model type": (write("config.json", '{"model_type": "unheard-of"}'), "unheard-of"),
    "no weights": (remove("model.safetensors"), "holds neither .*index.json nor model.safetensors"),
    "truncated weights": (truncate, "cannot read .*model.safetensors: .*download it again"),
    "LFS pointer": (write("model.safetensors", "version https://git-lfs"), "cannot read .*model.safetensors"),
    "text-only model": (make_text_only, "is of type 'qwen3', which lookonce does not support"),
    "no tower tensors": (drop_tower, "no vision tower"),
    "index not JSON": (write(INDEX, "{"), f"/{INDEX} is broken .*download it again"),
    "index without a map": (write(INDEX, '{"weight_map": 3}'), f"/{INDEX} is broken .*download it again"),
}


@pytest.mark.parametrize(("damage", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_folder_without_a_usable_model_is_refused_by_name(model, damage, message):
    damage(model)
    with pytest.raises(ModelError, match=message) as caught:
        ModelFolder.open(str(model))
    assert str(model) in str(caught.value)


def test_a_hub_model_that_is_unavailable_is_refused_with_the_command_to_fetch_it(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="owner/name' at its newest .*offline.*run: lookonce fetch RUN.yaml"):
        ModelFolder.open("owner/name")


def test_a_missing_weights_file_is_refused_by_name(model):
    names = load_file(model / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "part-1.safetensors")}
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="cannot read .*part-1.safetensors: .*download it again"):
        list(ModelFolder.open(str(model)).tower_tensors())


def test_weights_that_may_not_be_read_are_not_called_missing(model, with_mode):
    weights = model / "model.safetensors"
    with_mode(weights, 0o000)
    with pytest.raises(ModelError, match=f"cannot open {weights}: Permission denied; .* namei -l {weights}"):
        ModelFolder.open(str(model))


NO_FOLDER = r"no model folder at FOLDER/NAME \(.*set `model.path` to a folder or to a Hub id"
NEITHER = "no model folder at|is not available from the Hub"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, NO_FOLDER) for name in ("absent", "two words", "a/b/c", "absent/", "owner/two words")),
        ("FOLDER/absent", "no model folder at FOLDER/NAME; "),
        *((name, NEITHER) for name in ("./model", "../model", "a--b/c", "-a/b", "a/b.", "model")),
        ("MODEL/config.json", "no model folder at"),
    ],
)
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(sample, tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    name = name.replace("MODEL", str(sample / "model"))
    message = message.replace("FOLDER/NAME", str(tmp_path / name.removeprefix("FOLDER/")))
    with pytest.raises(ModelError, match=message):
        ModelFolder.open(name.replace("FOLDER", str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pos_embed.weight", lambda tensor: None),
        ("extra.weight", lambda tensor: torch.zeros(2)),
        ("merger.norm.weight", lambda tensor: tensor[:-1].clone()),
    ],
    ids=["missing", "unknown", "of another shape"],
)
def test_a_tower_that_does_not_fit_its_configuration_is_refused_by_tensor(model, name, change):
    tensors = load_file(model / "model.safetensors")
    tensors["model.visual." + name] = change(tensors.get("model.visual." + name))
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, model / "model.safetensors")
    with pytest.raises(ModelError, match=f"does not fit its configuration: 1 tensors .*{name}"):
        Tower(ModelFolder.open(str(model)), torch.float32)


def test_all_weights_are_read_ahead_and_a_missing_file_is_left_to_who_loads_it(model, monkeypatch):
    advised = queue.SimpleQueue()
    monkeypatch.setattr(os, "posix_fadvise", lambda *words: advised.put(words[1:]))
    weights = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
    (model / INDEX).write_text(json.dumps({"weight_map": {"absent": "absent.safetensors"} | weights}))
    ModelFolder.open(str(model)).read_ahead()
    assert advised.get(timeout=10) == (0, 0, os.POSIX_FADV_WILLNEED)
