"""Loading the model without its tower, and LoRA on the language model only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.errors import ModelError, RunFolderError
from lookonce.run.sections import LoraSection
from lookonce.train.model.load import CachedVisionTower, add_lora, load_trained, load_with_tower, load_without_tower

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture(scope="module")
def model_folder(sample: Path) -> ModelFolder:
    return ModelFolder.open(str(sample / "model"))


def lora(**options) -> LoraSection:
    return LoraSection(**options)


def test_the_tower_is_never_in_memory(model_folder):
    model = load_without_tower(model_folder, torch.float32)
    assert isinstance(model.model.visual, CachedVisionTower)
    assert not list(model.model.visual.parameters())
    assert not [name for name, _ in model.named_parameters() if "visual" in name]


def test_the_rest_is_the_stock_model(model_folder):
    without, stock = load_without_tower(model_folder, torch.float32), load_with_tower(model_folder, torch.float32)
    assert type(without) is Qwen3VLForConditionalGeneration
    weights = stock.state_dict()
    language = {name: weight for name, weight in without.state_dict().items()}
    assert language.keys() == {name for name in weights if ".visual." not in name}
    assert all(torch.equal(weight, weights[name]) for name, weight in language.items())


def test_only_the_adapter_is_trained_and_in_float32(model_folder):
    model = add_lora(load_without_tower(model_folder, torch.bfloat16), model_folder, lora(), seed=0)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert {weight.dtype for name, weight in model.named_parameters() if name not in trained} == {torch.bfloat16}


def test_the_same_seed_gives_the_same_adapter(model_folder):
    def weights(seed):
        model = add_lora(load_without_tower(model_folder, torch.float32), model_folder, lora(rank=4), seed)
        return torch.cat([weight.flatten() for weight in model.parameters() if weight.requires_grad])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize(
    "options",
    [
        {"targets": ["q_proj", "qkv"]},
        {"targets": r".*\.(q_proj|linear_fc1)"},
        {"targets": r"model\.visual\..*proj"},
        {"modules_to_save": ["merger"]},
    ],
)
def test_lora_that_reaches_into_the_tower_is_refused_by_name(model_folder, options):
    with pytest.raises(ModelError, match=r"lora\.\w+ reaches into the vision tower.*model\.visual\."):
        add_lora(load_without_tower(model_folder, torch.float32), model_folder, lora(**options), seed=0)


def test_all_linear_means_the_language_model(model_folder):
    model = add_lora(load_without_tower(model_folder, torch.float32), model_folder, lora(targets="all-linear"), seed=0)
    assert sorted(model.peft_config["default"].target_modules) == sorted(lora().targets)


def test_lora_targets_that_match_nothing_are_refused(model_folder):
    with pytest.raises(ModelError, match=r"lora.targets \['no_such_module'\]"):
        add_lora(
            load_without_tower(model_folder, torch.float32), model_folder, lora(targets=["no_such_module"]), seed=0
        )


def test_a_misspelt_module_to_save_is_refused_with_the_nearest(model_folder):
    options = lora(modules_to_save=["embed_token"])
    with pytest.raises(ModelError, match="named 'embed_token'; did you mean `embed_tokens`"):
        add_lora(load_without_tower(model_folder, torch.float32), model_folder, options, seed=0)


def test_a_broken_pattern_is_refused(model_folder):
    with pytest.raises(ModelError, match=r"lora.targets '\.\*\(' is not a regular expression"):
        add_lora(load_without_tower(model_folder, torch.float32), model_folder, lora(targets=".*("), seed=0)


def test_an_attention_that_is_not_installed_is_refused(model_folder):
    with pytest.raises(ModelError, match="model.attention: flash_attention_2"):
        load_without_tower(model_folder, torch.bfloat16, "flash_attention_2")


def test_a_run_without_an_adapter_is_an_error(model_folder, make_run, tmp_path):
    with pytest.raises(RunFolderError, match="has no adapter_model.safetensors; train again with"):
        load_trained(model_folder, make_run(), tmp_path)


DOWN = "model.language_model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda name, tensor: {name: tensor[:3] if name == DOWN else tensor},
            rf"other shapes for 1 tensor of the model: {DOWN} \[3, 128\] instead of \[64, 128\]",
        ),
        (
            lambda name, tensor: {name.replace("language_model.layers", "text.layers"): tensor},
            r"no values for 44 tensors .* does not know: model.text.layers",
        ),
    ],
)
def test_a_checkpoint_that_leaves_a_tensor_random_is_refused(model_folder, tmp_path, change, message):
    """Each family with published and newer names: tests/integration/families/test_checkpoints.py."""
    place = tmp_path / "model"
    shutil.copytree(model_folder.folder, place, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(model_folder.folder / "model.safetensors")
    others = {key: value.clone() for name, tensor in weights.items() for key, value in change(name, tensor).items()}
    save_file(others, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_without_tower(ModelFolder.open(str(place)), torch.float32)
