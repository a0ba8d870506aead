"""The forward pass without host-device syncs: the stock model's bits, and the replaced methods exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.train.model.compile import add_features, without_syncs
from lookonce.train.model.load import load_without_tower

SEED = 0


@pytest.fixture(scope="module")
def model(sample: Path):
    return load_without_tower(ModelFolder.open(str(sample / "model")), torch.float32)


def logits(model, token_ids: torch.Tensor, features: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(token_ids.shape[1]).expand(3, 1, -1)
    given = {"input_ids": token_ids, "position_ids": positions, "pixel_values": features, "image_grid_thw": grids}
    with torch.no_grad():
        return model(**given, use_cache=False).logits


@pytest.mark.guarantee("The model without host-device syncs gives the stock model's bits.")
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


@pytest.mark.guarantee("The model without host-device syncs gives the stock model's bits.")
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
