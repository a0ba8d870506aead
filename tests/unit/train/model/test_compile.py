"""Setting up decoder layers for packs: only layers of full attention, and undone afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.errors import ModelError
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.train.model.attention import NAME
from lookonce.train.model.compile import as_loaded, training_on_packs
from lookonce.train.model.load import load_without_tower, text_model


@pytest.fixture(scope="module")
def model_folder(sample: Path) -> ModelFolder:
    return ModelFolder.open(str(sample / "model"))


@pytest.fixture(autouse=True)
def qwen3_5_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family with other layers, of which none may be in a pack."""
    monkeypatch.setitem(FAMILIES, "qwen3_5", replace(DEFAULT, name="Qwen3.5", has_deepstack=False))


def qwen3_5(layer_types: list[str]) -> Qwen3_5ForConditionalGeneration:
    """A tiny Qwen3.5 without weights."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    text = sizes | {"num_hidden_layers": len(layer_types), "layer_types": layer_types, "vocab_size": 64}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    with torch.device("meta"):
        return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


@pytest.mark.parametrize("other", ["linear_attention", "sliding_attention"])
def test_layers_without_full_attention_are_refused_by_name(other):
    model = qwen3_5(["full_attention", "full_attention"])
    text_model(model).config.layer_types = ["full_attention", other]
    before = text_model(model).config._attn_implementation
    message = f"^Qwen3.5 has layers of {other}, which .* apart; set batch.mode: separate and eval.engine: generate$"
    with pytest.raises(ModelError, match=message), training_on_packs(model, compiled=False):
        pytest.fail("it was not refused")
    assert text_model(model).config._attn_implementation == before


def test_layers_of_full_attention_are_accepted_whether_the_config_lists_them_or_not(model_folder):
    for model in (qwen3_5(["full_attention"] * 2), load_without_tower(model_folder, torch.float32)):
        with training_on_packs(model, compiled=False):
            assert text_model(model).config._attn_implementation == NAME


@pytest.mark.parametrize("compiled", [False, True])
def test_a_setup_within_another_is_undone_and_the_outer_one_stays(model_folder, monkeypatch, compiled):
    """As answers are given while training: without the packs' attention, or in packs that are compiled or not."""
    monkeypatch.setattr("torch.compile", lambda function, **options: function)
    model = load_without_tower(model_folder, torch.float32)
    text = text_model(model)

    def setup():
        layers = [layer._compiled_call_impl for layer in text.layers]
        return text.config._attn_implementation, layers, dict(vars(text)), model.model.get_placeholder_mask

    before = setup()
    with pytest.raises(KeyboardInterrupt), training_on_packs(model, compiled=True):
        during = setup()
        assert None not in during[1][:-1]
        with as_loaded(model, "eager"):
            assert setup()[:2] == ("eager", [None] * len(text.layers))
            with training_on_packs(model, compiled=compiled, attention="sdpa"):
                assert (setup()[1][0] is not None) == compiled
            assert setup()[:2] == ("eager", [None] * len(text.layers))
        assert setup() == during
        raise KeyboardInterrupt
    assert setup() == before
