"""The fingerprint changes with everything that changes features, and with nothing else."""

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

from lookonce.cache.format import FORMAT_VERSION, STORAGE
from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.fingerprint import FOLDER_DIGITS, Fingerprint, hash_tensors
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


def rewrite_tensors(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def rewrite_json(path: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


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


@pytest.fixture
def model(sample: Path, tmp_path: Path) -> Path:
    """A copy of the sample's model that tests may change."""
    return Path(shutil.copytree(sample / "model", tmp_path / "model"))


@pytest.fixture(scope="module")
def original(sample: Path) -> Fingerprint:
    return fingerprint_of(sample / "model")


@pytest.mark.guarantee("A different tower, different pixels or a different dtype makes a different cache.")
@pytest.mark.parametrize("change", [flip_a_bit, swap_two_tensors, store_as_bfloat16])
def test_other_tower_tensors_give_another_fingerprint(model, original, change):
    rewrite_tensors(model, change)
    changed = fingerprint_of(model)
    assert changed.folder_name != original.folder_name
    assert [name for name, _, _ in changed.differences(original)] == ["tower_sha256"]


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


def test_another_processor_backend_gives_another_fingerprint(sample, original):
    processor = ImageProcessor(sample / "model")
    processor.backend = "torchvision"
    changed = Fingerprint.of(ModelFolder.open(str(sample / "model")), processor, "float32")
    assert changed.folder_name != original.folder_name
    assert changed.differences(original) == [("image_processor.backend", "torchvision", "pil")]


def test_another_format_version_gives_another_fingerprint(sample, original, monkeypatch):
    monkeypatch.setattr("lookonce.cache.store.fingerprint.FORMAT_VERSION", FORMAT_VERSION + 1)
    changed = fingerprint_of(sample / "model")
    assert changed.folder_name != original.folder_name
    assert changed.differences(original) == [("format_version", FORMAT_VERSION + 1, FORMAT_VERSION)]


@pytest.mark.guarantee("A different tower, different pixels or a different dtype makes a different cache.")
@pytest.mark.parametrize(
    ("file", "section", "key", "value", "field"),
    [
        ("config.json", "vision_config", "hidden_act", "silu", "tower_config.hidden_act"),
        ("config.json", "vision_config", "num_heads", 8, "tower_config.num_heads"),
        ("preprocessor_config.json", None, "image_mean", [0.4, 0.5, 0.5], "image_processor.image_mean"),
        ("preprocessor_config.json", None, "resample", 2, "image_processor.resample"),
        ("preprocessor_config.json", None, "do_normalize", False, "image_processor.do_normalize"),
    ],
)
def test_other_settings_in_the_folder_give_another_fingerprint(model, original, file, section, key, value, field):
    rewrite_json(model / file, lambda content: (content[section] if section else content).update({key: value}))
    changed = fingerprint_of(model)
    assert changed.sha256 != original.sha256
    assert [name for name, _, _ in changed.differences(original)] == [field]


def test_other_deepstack_levels_give_another_fingerprint(model, original):
    indexes = {"deepstack_visual_indexes": [0, 1]}
    rewrite_json(model / "config.json", lambda config: config["vision_config"].update(indexes))
    named = [name for name, _, _ in fingerprint_of(model).differences(original)]
    assert named == ["num_levels", "tower_config.deepstack_visual_indexes"]


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


@pytest.mark.guarantee("A different language model, path or order of records keeps the same cache.")
def test_language_model_weights_do_not_matter(model, original):
    rewrite_tensors(model, change_language_model)
    assert fingerprint_of(model).sha256 == original.sha256


@pytest.mark.guarantee("A different language model, path or order of records keeps the same cache.")
def test_the_folder_does_not_matter(model, original):
    assert fingerprint_of(model.rename(model.with_name("elsewhere"))).sha256 == original.sha256


@pytest.mark.guarantee("A different language model, path or order of records keeps the same cache.")
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


@pytest.mark.parametrize("num_files", [2, 3])
def test_splitting_the_checkpoint_into_files_does_not_matter(model, original, num_files):
    tensors = load_file(model / "model.safetensors")
    file_of = {name: f"model-{number % num_files}.safetensors" for number, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if file_of[name] == file}, model / file)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    assert fingerprint_of(model).sha256 == original.sha256


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("vision_config", "dtype", "bfloat16"),
        ("vision_config", "initializer_range", 0.5),
        ("text_config", "num_hidden_layers", 3),
    ],
)
def test_configuration_that_does_not_reach_the_tower_does_not_matter(model, original, section, key, value):
    rewrite_json(model / "config.json", lambda config: config[section].update({key: value}))
    assert fingerprint_of(model).sha256 == original.sha256


def test_a_fingerprint_is_the_same_after_a_round_trip_through_json(original):
    back = Fingerprint.from_json(json.loads(json.dumps(original.to_json())))
    assert back == original
    assert back.sha256 == original.sha256


def test_differences_name_the_dotted_field_and_both_values():
    other = replace(
        BY_HAND,
        dtype="float32",
        image_processor=BY_HAND.image_processor | {"min_pixels": 1024, "do_resize": True},
    )
    assert BY_HAND.differences(other) == [
        ("dtype", "bfloat16", "float32"),
        ("image_processor.do_resize", None, True),
        ("image_processor.min_pixels", 4096, 1024),
    ]
    assert BY_HAND.differences(BY_HAND) == []


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


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", 4 * 64 * 2), ("float32", 4 * 64 * 4), ("fp8_e4m3", 4 * (64 + 4))]
)
def test_sizes_follow_from_the_fingerprint(dtype, expected):
    fingerprint = replace(BY_HAND, dtype=dtype)
    assert (fingerprint.hidden_size, fingerprint.bytes_per_token) == (64, expected)
    assert fingerprint.storage is STORAGE[dtype]


def test_an_unknown_dtype_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'float16' is not one of bfloat16, float32, fp8_e4m3"):
        Fingerprint.from_json(BY_HAND.to_json() | {"dtype": "float16"})
