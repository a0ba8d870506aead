"""Fingerprint and hash of a model: they change with what they stand for, and with nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_caches import flip

from lookonce.cache.format import read_header
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.fingerprint import FOLDER_DIGITS, Fingerprint, hash_language_model, hash_tensors
from lookonce.run.open import TO_BUILD, open_run

BY_HAND = Fingerprint(
    format_version=1,
    tower_sha256="ab" * 32,
    tower_config={"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1, 2]},
    image_processor={"backend": "pil", "min_pixels": 4096, "image_mean": [0.5, 0.5, 0.5]},
    num_levels=4,
    dtype="bfloat16",
)


def fingerprint_of(model: Path, dtype: str = "float32", **pixels: int) -> Fingerprint:
    return Fingerprint.of(ModelFolder.open(str(model)), ImageProcessor(model, **pixels), dtype)


def flip_a_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.visual.blocks.0.mlp.linear_fc1.weight"].view(torch.int32)[0, 0] ^= 1


def swap_two_tensors(tensors: dict[str, torch.Tensor]) -> None:
    one, other = "model.visual.blocks.0.attn.qkv.weight", "model.visual.blocks.1.attn.qkv.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def store_as_bfloat16(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.visual.pos_embed.weight"
    tensors[name] = tensors[name].bfloat16()


def change_language_model(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not name.startswith("model.visual."):
            tensor += 1


def rewrite_by(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    return rewrite


def configure(section: str, key: str, value: object) -> Callable[[Path], None]:
    """Changes a value in a section of config.json, or of the image processor's settings."""

    def rewrite(model: Path) -> None:
        path = model / ("config.json" if section else "preprocessor_config.json")
        content = json.loads(path.read_text())
        (content[section] if section else content)[key] = value
        path.write_text(json.dumps(content))

    return rewrite


@pytest.fixture(scope="module")
def original(sample: Path) -> Fingerprint:
    return fingerprint_of(sample / "model")


@pytest.mark.guarantee("A different tower, different pixels or a different dtype makes a different cache.")
@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"max_pixels": 16_384}, "image_processor.max_pixels", 16_384),
        ({"min_pixels": 8_192}, "image_processor.min_pixels", 8_192),
        ({"dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"dtype": "fp8_e4m3"}, "dtype", "fp8_e4m3"),
    ],
)
def test_other_options_give_another_fingerprint_and_name_the_field(sample, original, options, field, value):
    changed = fingerprint_of(sample / "model", **options)
    assert changed.folder_name != original.folder_name
    [(name, mine, theirs)] = changed.differences(original)
    assert (name, mine) == (field, value)
    assert theirs not in (None, value)


@pytest.mark.guarantee("A different tower, different pixels or a different dtype makes a different cache.")
@pytest.mark.parametrize(
    ("change", "fields"),
    [
        *((change, "tower_sha256") for change in map(rewrite_by, (flip_a_bit, swap_two_tensors, store_as_bfloat16))),
        (configure("vision_config", "hidden_act", "silu"), "tower_config.hidden_act"),
        (
            configure("vision_config", "deepstack_visual_indexes", [0, 1]),
            "num_levels tower_config.deepstack_visual_indexes",
        ),
        (configure("", "image_mean", [0.4, 0.5, 0.5]), "image_processor.image_mean"),
        (configure("", "resample", 2), "image_processor.resample"),
    ],
)
def test_another_tower_or_setting_in_the_folder_gives_another_fingerprint(model, original, change, fields):
    change(model)
    changed = fingerprint_of(model)
    assert changed.folder_name != original.folder_name
    assert [name for name, _, _ in changed.differences(original)] == fields.split()


@pytest.mark.parametrize("position", [0, -1])
@pytest.mark.parametrize("bit", [0, 31])
def test_a_single_bit_of_any_tower_tensor_matters(sample, position, bit):
    """A part of each tensor stands for it: to hash all of them for each bit takes seconds."""
    tensors = {name: tensor[:1] for name, tensor in ModelFolder.open(str(sample / "model")).tower_tensors()}
    hashes = {hash_tensors(iter(tensors.items()))}
    for tensor in tensors.values():
        number = tensor.view(-1).view(torch.int32)[position : position + 1 or None]
        number ^= torch.tensor([1 << bit], dtype=torch.int64).int()
        hashes.add(hash_tensors(iter(tensors.items())))
    assert len(hashes) == 1 + len(tensors)


@pytest.mark.guarantee("Another language model, other paths or another order of the records use the same cache.")
def test_records_and_their_order_do_not_matter(sample, tmp_path, make_run, original):
    lines = (sample / "train.jsonl").read_text().splitlines()
    changed = [json.loads(line) for line in lines[:3]]
    for record in changed:
        record["turns"][0]["question"] = "Another question?"
    shutil.copytree(sample / "images", tmp_path / "images")
    (tmp_path / "changed.jsonl").write_text("\n".join(map(json.dumps, reversed(changed))))
    inputs = open_run(
        make_run(data={split: str(tmp_path / "changed.jsonl") for split in ("train", "val", "test")}), TO_BUILD
    )
    assert inputs.fingerprint == original
    assert inputs.cache_folder.name == original.folder_name


NOT_MEANT = {
    "weights of the language model": rewrite_by(change_language_model),
    "layers of the language model": configure("text_config", "num_hidden_layers", 3),
    "dtype in the configuration": configure("vision_config", "dtype", "bfloat16"),
    "initialisation": configure("vision_config", "initializer_range", 0.5),
    "folder": lambda model: model.rename(model.with_name("elsewhere")),
}


@pytest.mark.guarantee("Another language model, other paths or another order of the records use the same cache.")
@pytest.mark.parametrize("change", NOT_MEANT.values(), ids=NOT_MEANT)
def test_what_does_not_reach_the_tower_does_not_matter(model, original, change):
    assert fingerprint_of(change(model) or model).sha256 == original.sha256


def test_the_hash_of_a_fingerprint_does_not_drift():
    assert BY_HAND.sha256 == "c9e7f9a0e781d6a62547df98813b6ac28e417fce004305c55be6d58888cbd0d1"
    assert BY_HAND.folder_name == "c9e7f9a0e781d6a6" == BY_HAND.sha256[:FOLDER_DIGITS]
    shuffled = replace(BY_HAND, tower_config=dict(reversed(BY_HAND.tower_config.items())))
    assert shuffled.sha256 == BY_HAND.sha256


def test_the_hash_of_tensors_does_not_drift():
    tensors = {
        "a.weight": torch.tensor([[1.0, -2.0]]),
        "a.bias": torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        "b": torch.tensor(258, dtype=torch.int16),
    }
    expected = (
        b"a.weight torch.float32 (1, 2)\n\x00\x00\x80\x3f\x00\x00\x00\xc0"
        b"a.bias torch.bfloat16 (2,)\n\x80\x3f\x00\xc0"
        b"b torch.int16 ()\n\x02\x01"
    )
    assert hash_tensors(iter(tensors.items())) == hashlib.sha256(expected).hexdigest()


WEIGHTS = "model.safetensors"


def tensors(folder: Path, *, of_tower: bool) -> list[str]:
    names = read_header(folder / WEIGHTS)[0].keys() - {"__metadata__"}
    return sorted(name for name in names if name.startswith("model.visual.") == of_tower)


def change(folder: Path, tensor: str) -> None:
    """Flip the last bit of a tensor."""
    header, start = read_header(folder / WEIGHTS)
    flip(folder / WEIGHTS, start + header[tensor]["data_offsets"][1] - 1)


def test_each_file_and_a_vocabulary_in_the_older_files_count_and_a_note_does_not(model):
    before = {hash_language_model(model)}
    for number, name in enumerate(("chat_template.jinja", "tokenizer.json", "config.json"), start=2):
        with (model / name).open("a") as file:
            file.write(" ")
        before.add(hash_language_model(model))
        assert len(before) == number, name
    hashes = []
    for name in ("merges.txt", "vocab.txt", "notes.txt", "README.md"):
        (model / name).write_text("a b")
        hashes.append(hash_language_model(model))
    assert len({*hashes}) == 2 and hashes[1] == hashes[-1]


def test_each_tensor_of_the_language_model_counts_and_none_of_the_tower(model):
    names = tensors(model, of_tower=False)
    seen = {hash_language_model(model)}
    for name in names:
        change(model, name)
        seen.add(hash_language_model(model))
    change(model, tensors(model, of_tower=True)[0])
    assert len(seen | {hash_language_model(model)}) == len(names) + 1
