"""Loading the model without its tower, and LoRA on the language model only."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from lookonce.errors import ModelError, RunFolderError
from lookonce.run.sections import LoraSection
from lookonce.train.model.load import CachedVisionTower, add_lora, load_trained, load_with_tower, load_without_tower

pytestmark = pytest.mark.usefixtures("no_fsync")


def test_the_tower_is_never_in_memory_and_the_rest_is_the_stock_model(sample_model):
    model, stock = load_without_tower(sample_model, torch.float32), load_with_tower(sample_model, torch.float32)
    assert isinstance(model.model.visual, CachedVisionTower) and type(model) is Qwen3VLForConditionalGeneration
    found, weights = model.state_dict(), stock.state_dict()
    assert found.keys() == {name for name in weights if ".visual." not in name}
    assert all(torch.equal(weight, weights[name]) for name, weight in found.items())


def test_only_the_adapter_is_trained_and_in_float32(sample_model):
    model = add_lora(load_without_tower(sample_model, torch.bfloat16), sample_model, LoraSection(), seed=0)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert {weight.dtype for name, weight in model.named_parameters() if name not in trained} == {torch.bfloat16}


def test_the_same_seed_gives_the_same_adapter(sample_model):
    def weights(seed):
        model = add_lora(load_without_tower(sample_model, torch.float32), sample_model, LoraSection(rank=4), seed)
        return torch.cat([weight.flatten() for weight in model.parameters() if weight.requires_grad])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


REACHES_IN = r"lora\.\w+ reaches into the vision tower.*model\.visual\."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ["q_proj", "qkv"]}, REACHES_IN),
        ({"targets": r".*\.(q_proj|linear_fc1)"}, REACHES_IN),
        ({"targets": r"model\.visual\..*proj"}, REACHES_IN),
        ({"modules_to_save": ["merger"]}, REACHES_IN),
        ({"targets": ["no_such_module"]}, r"lora.targets \['no_such_module'\]"),
        ({"targets": ".*("}, r"lora.targets '\.\*\(' is not a regular expression"),
        ({"modules_to_save": ["embed_token"]}, "named 'embed_token'; did you mean `embed_tokens`"),
    ],
)
def test_lora_that_reaches_into_the_tower_or_matches_nothing_is_refused(sample_model, options, message):
    with pytest.raises(ModelError, match=message):
        add_lora(load_without_tower(sample_model, torch.float32), sample_model, LoraSection(**options), seed=0)


def test_an_attention_that_is_not_installed_is_refused(sample_model):
    with pytest.raises(ModelError, match="model.attention: flash_attention_2"):
        load_without_tower(sample_model, torch.bfloat16, "flash_attention_2")


def test_a_run_without_an_adapter_is_an_error(sample_model, make_run, tmp_path):
    with pytest.raises(RunFolderError, match="has no adapter_model.safetensors; train again with"):
        load_trained(sample_model, make_run(), tmp_path)
