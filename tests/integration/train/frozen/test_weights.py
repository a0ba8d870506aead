"""Quantised models: which weights are rounded, which stay, and what an evaluation leaves as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.errors import ModelError
from lookonce.run.sections import LoraSection
from lookonce.train.model.load import add_lora, load_with_tower, load_without_tower, text_model

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'lookonce[qlora]'")

KINDS = ("int8", "nf4")
PRODUCTS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def rounded(model: Any) -> set[str]:
    """The modules with weights of whole numbers."""
    return {name.removesuffix(".weight") for name, one in model.named_parameters() if not one.is_floating_point()}


@pytest.mark.parametrize("frozen", KINDS)
def test_the_products_of_the_decoder_layers_are_rounded_and_nothing_else(sample_model, frozen):
    for load in (load_without_tower, load_with_tower):
        model = load(sample_model, torch.bfloat16, frozen=frozen)
        layers = [f"model.language_model.layers.{number}." for number in range(len(text_model(model).layers))]
        found = rounded(model)
        assert len(found) == len(layers) * len(PRODUCTS) and {name.rpartition(".")[2] for name in found} == PRODUCTS
        assert all(name.startswith(tuple(layers)) for name in found)


def changed(
    sample_model: ModelFolder, place: Path, tensors: dict[str, torch.Tensor | None], **config: Any
) -> ModelFolder:
    """A copy of the model with other tensors, without those that are None, and with other settings."""
    shutil.copytree(sample_model.folder, place)
    weights = load_file(place / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, place / "model.safetensors")
    settings = json.loads((place / "config.json").read_text()) | config
    (place / "config.json").write_text(json.dumps(settings))
    return ModelFolder.open(str(place))


def test_a_tied_output_layer_keeps_its_precision(sample_model, tmp_path):
    tied = changed(sample_model, tmp_path / "model", {"lm_head.weight": None}, tie_word_embeddings=True)
    model = load_without_tower(tied, torch.bfloat16, frozen="nf4")
    assert model.lm_head.weight is text_model(model).embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.bfloat16


UP = "model.language_model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("frozen", KINDS)
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, f"no values for 1 tensor of the model: {UP};"),
        (torch.ones(3, 64), rf"other shapes for 1 tensor of the model: {UP} \[3, 64\] instead of \[128, 64\]"),
    ],
)
def test_a_checkpoint_that_leaves_a_tensor_random_is_refused(sample_model, tmp_path, frozen, tensor, message):
    broken = changed(sample_model, tmp_path / "model", {UP: tensor})
    with pytest.raises(ModelError, match=message):
        load_without_tower(broken, torch.bfloat16, frozen=frozen)


def test_a_new_adapter_is_that_of_weights_that_are_not_quantised(sample_model):
    def weights(frozen: str) -> dict[str, torch.Tensor]:
        model = add_lora(load_without_tower(sample_model, torch.float32, frozen=frozen), sample_model, LoraSection(), 1)
        return {name: weight.cpu() for name, weight in model.named_parameters() if weight.requires_grad}

    expected = weights("precision")
    for found in map(weights, KINDS):
        assert found.keys() == expected.keys()
        assert all(
            weight.dtype == torch.float32 and torch.equal(weight, expected[name]) for name, weight in found.items()
        )


@pytest.mark.parametrize("frozen", KINDS)
def test_a_quantised_module_cannot_be_trained_as_a_whole(sample_model, frozen):
    model = load_without_tower(sample_model, torch.float32, frozen=frozen)
    with pytest.raises(
        ModelError, match="modules_to_save: down_proj is quantised.*layers.0.mlp.down_proj.* lora.targets"
    ):
        add_lora(model, sample_model, LoraSection(modules_to_save=["down_proj"]), seed=0)
    add_lora(model, sample_model, LoraSection(modules_to_save=["embed_tokens"]), seed=0)


@pytest.mark.parametrize("frozen", KINDS)
def test_an_evaluation_leaves_the_weights_as_they_are(sample_model, frozen, monkeypatch):
    """On a CPU with bfloat16, bitsandbytes packs 4-bit weights for evaluation, with scales that are rounded again."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = load_without_tower(sample_model, torch.float32, frozen=frozen)
    tokens = torch.arange(20, device=model.device)[None]
    training = model.train()(input_ids=tokens).logits
    with torch.no_grad():
        model.eval()(input_ids=tokens)
    assert torch.equal(model.train()(input_ids=tokens).logits, training)
