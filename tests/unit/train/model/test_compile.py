"""Setting up decoder layers for packs, without host-device syncs: layers of full attention alone, and undone later."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from lookonce.errors import ModelError
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.train.model import compile
from lookonce.train.model.attention import NAME
from lookonce.train.model.compile import add_features, as_loaded, training_on_packs, without_syncs
from lookonce.train.model.load import load_without_tower, text_model


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


def test_layers_of_full_attention_are_accepted_whether_the_config_lists_them_or_not(sample_model):
    for model in (qwen3_5(["full_attention"] * 2), load_without_tower(sample_model, torch.float32)):
        with training_on_packs(model, compiled=False):
            assert text_model(model).config._attn_implementation == NAME


@pytest.mark.parametrize("compiled", [False, True])
def test_a_setup_within_another_is_undone_and_the_outer_one_stays(sample_model, monkeypatch, compiled):
    """As answers are given while training: without the packs' attention, or in packs that are compiled or not."""
    monkeypatch.setattr(compile, "compiled_call", lambda dynamic: torch.nn.Module._call_impl)
    model = load_without_tower(sample_model, torch.float32)
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


SEED = 0


@pytest.fixture(scope="module")
def model(sample_model):
    return load_without_tower(sample_model, torch.float32)


def logits(model, token_ids: torch.Tensor, features: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(token_ids.shape[1]).expand(3, 1, -1)
    given = {"input_ids": token_ids, "position_ids": positions, "pixel_values": features, "image_grid_thw": grids}
    with torch.no_grad():
        return model(**given, use_cache=False).logits


@pytest.mark.guarantee("The model without host-device syncs is bit-identical to the stock model.")
@pytest.mark.parametrize("num_images", [1, 3])
def test_logits_are_bit_identical_to_the_stock_models(model, num_images):
    torch.manual_seed(SEED)
    image, hidden = model.config.image_token_id, model.config.text_config.hidden_size
    levels = 1 + len(model.config.vision_config.deepstack_visual_indexes)
    one = [5, *[image] * 6, 7, 8]
    token_ids = torch.tensor([one * num_images])
    features = torch.randn(6 * num_images, levels, hidden)
    grids = torch.tensor([[1, 4, 6]] * num_images)
    stock = logits(model, token_ids, features, grids)
    with without_syncs(model):
        assert torch.equal(logits(model, token_ids, features, grids), stock)
        assert not torch.equal(logits(model, token_ids, features.flip(1), grids), stock)


@pytest.mark.guarantee("The model without host-device syncs is bit-identical to the stock model.")
def test_features_are_added_as_the_stock_model_adds_them(model):
    torch.manual_seed(SEED)
    states, is_image = torch.randn(2, 5, 8, requires_grad=True), torch.rand(2, 5) < 0.5
    features = torch.randn(int(is_image.sum()), 8)
    stock = type(model.model.language_model)._deepstack_process(None, states, is_image, features)
    ours = add_features(states, is_image, features)
    assert torch.equal(ours, stock)
    direction = torch.randn_like(stock)
    gradients = [torch.autograd.grad(out, states, direction)[0] for out in (ours, stock)]
    assert torch.equal(*gradients)


def test_replaced_methods_exist_and_are_restored(model):
    inner, text = model.model, model.model.language_model
    before = inner.get_placeholder_mask, text._deepstack_process
    with without_syncs(model):
        assert inner.get_placeholder_mask.__qualname__ != before[0].__qualname__
        assert text._deepstack_process is add_features
    assert (inner.get_placeholder_mask, text._deepstack_process) == before


@pytest.mark.parametrize(("has_gpu", "number"), [(True, 3), (False, 0)])
def test_the_compiler_is_loaded_and_its_processes_start_where_there_is_a_gpu(monkeypatch, has_gpu, number):
    loaded: list[str] = []
    stand_in = mock.Mock(spec_set=["AsyncCompile"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(compile, "find_spec", lambda name: name)
    monkeypatch.setattr(compile, "import_module", lambda name: loaded.append(name) or stand_in)
    compile.load_compiler()
    assert len(loaded) == number and all(importlib.util.find_spec(name) for name in loaded)
    assert stand_in.AsyncCompile.wakeup.called is has_gpu and hasattr(AsyncCompile, "wakeup")
