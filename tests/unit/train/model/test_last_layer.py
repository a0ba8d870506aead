"""The last layer, computed for some tokens, gives the stock model's loss and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.trainings import draw_lora_b
from torch.nn.attention.flex_attention import create_mask, flex_attention

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.families.lookup import DEFAULT, FAMILIES
from lookonce.run.sections import LoraSection
from lookonce.train.data.packing import BLOCK
from lookonce.train.model import attention, loss
from lookonce.train.model.attention import PackMask, dense_mask, shared_prefix_attention
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.load import add_lora, load_without_tower, text_model
from lookonce.train.model.loss import forward_loss, short_last_layer

CPU = torch.device("cpu")
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def model(sample: Path) -> Any:
    """The sample's model with an adapter that does something."""
    model_folder = ModelFolder.open(str(sample / "model"))
    adapted: Any = add_lora(load_without_tower(model_folder, torch.float32), model_folder, LoraSection(), seed=0)
    draw_lora_b(adapted, seed=0)
    return adapted


def pack() -> dict[str, torch.Tensor]:
    """A prefix of 10 tokens, two branches of 8 and padding; the first tokens of both are predicted from the prefix."""
    generator = torch.Generator().manual_seed(0)
    keep = torch.tensor([9, 13, 9, 20, 24, 20])
    return {
        "input_ids": torch.randint(5, 90, (1, NUM_TOKENS), generator=generator),
        "position_ids": torch.tensor([*range(18), *range(10, 18), *range(4)]).expand(3, 1, -1),
        "seen_until": torch.tensor([26] * 10 + [18] * 8 + [26] * 8 + [30] * 4),
        "logits_to_keep": keep,
        "targets": torch.randint(5, 90, (1, len(keep)), generator=generator),
        "weights": torch.rand(1, len(keep), generator=generator),
    }


def loss_and_gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = forward_loss(model, pack(), PackMask(NUM_TOKENS, CPU))
    loss.backward()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters() if weight.requires_grad)]


@pytest.mark.guarantee(
    "The last layer, computed for some tokens only, has the loss and gradients of the stock layer, in each family."
)
def test_loss_and_gradients_are_those_of_the_stock_layer(model, monkeypatch):
    seen = []
    text_model(model).norm.register_forward_hook(lambda *call: seen.append(call[-1].shape[1]))
    with training_on_packs(model, compiled=False):
        found = loss_and_gradients(model)
    monkeypatch.setitem(FAMILIES, DEFAULT.model_type, replace(DEFAULT, has_short_last_layer=False))
    with training_on_packs(model, compiled=False):
        expected = loss_and_gradients(model)
    assert seen == [len(pack()["logits_to_keep"]), NUM_TOKENS], "once for the tokens to predict from, and once for all"
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    assert any(gradient.abs().max() > 1e-3 for gradient in found[1:])


def test_it_is_for_layers_that_it_knows_and_to_which_no_features_are_added(model, monkeypatch):
    layers, config = text_model(model).layers, model.config.vision_config
    with short_last_layer(model):
        assert "forward" in vars(layers[-1])
    assert "forward" not in vars(layers[-1])
    monkeypatch.setattr(config, "deepstack_visual_indexes", list(range(len(layers))))
    with short_last_layer(model):
        assert "forward" not in vars(layers[-1])


def test_without_tokens_to_predict_from_it_computes_all(model):
    batch = {name: tensor for name, tensor in pack().items() if name in ("input_ids", "position_ids")}
    with torch.no_grad():
        expected = model(**batch).logits
        with short_last_layer(model):
            assert torch.equal(model(**batch).logits, expected)


def test_gradients_of_repeated_tokens_are_added():
    x = torch.randn(1, 4, 3, requires_grad=True)
    indices, gradient = torch.tensor([2, 0, 2, 2]), torch.randn(1, 4, 3)
    rows = loss._Rows.apply(x, indices)
    assert torch.equal(rows, x[:, indices])
    rows.backward(gradient)
    expected = torch.zeros(1, 4, 3).index_add(1, indices, gradient)
    torch.testing.assert_close(x.grad, expected)


def test_blocks_of_some_queries_follow_the_dense_mask(monkeypatch):
    """FlexAttention in its eager mode for debugging, as there is no GPU to compile for."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention, "_compiled", lambda: flex_attention)
    generator, length = torch.Generator().manual_seed(0), 4 * BLOCK
    column = torch.tensor([300] * 150 + [230] * 80 + [300] * 70 + [length] * (length - 300))
    rows = torch.randint(length, (2 * BLOCK,), generator=generator).sort().values
    rows[-40:] = 0  # what a captured pass is padded with
    mask, layer = PackMask(length, CPU), SimpleNamespace(num_key_value_groups=2, is_causal=False)
    expected = dense_mask(column)[:, :, rows]
    assert torch.equal(mask.of_rows(rows, column), expected), "on a CPU it is dense"
    mask.is_dense = False
    mask.blocks(column)
    blocks = mask.of_rows(rows, column)
    assert torch.equal(create_mask(blocks.mask_mod, None, None, len(rows), length, "cpu")[0, 0], expected[0, 0])
    assert not blocks.to_dense().all(), "blocks without pairs are not computed"
    tensors = [
        torch.randn(1, n, size, 16, generator=generator) for n, size in ((4, len(rows)), (2, length), (2, length))
    ]
    found, _ = shared_prefix_attention(layer, *tensors, blocks, scaling=0.3)
    right, _ = shared_prefix_attention(layer, *tensors, expected, scaling=0.3)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
